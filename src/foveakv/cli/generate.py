"""`foveakv generate`: answer one prompt with one method, then print the report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from foveakv.cli import common
from foveakv.cli.common import (
    AllowUrlsOption,
    BudgetOption,
    ChunkOption,
    DebugOption,
    DeviceOption,
    DtypeOption,
    ImagesOption,
    KVDtypeOption,
    MethodOption,
    ModelOption,
    ResidualLengthOption,
    TokensOption,
    TrustOption,
)
from foveakv.cli.prompts import SetOption, load_images
from foveakv.util import files


@common.friendly
def generate(
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt",
            "-p",
            help="The question. `<image>` marks the place of each image; without it, images come first.",
        ),
    ],
    model: ModelOption = "demo",
    image: ImagesOption = None,
    allow_urls: AllowUrlsOption = False,
    method: MethodOption = "hybridkv",
    budget: BudgetOption = None,
    set_: SetOption = None,
    kv_dtype: KVDtypeOption = None,
    residual_length: ResidualLengthOption = 32,
    prefill_chunk: ChunkOption = None,
    max_new_tokens: TokensOption = 256,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write answer, report and versions to this JSON file.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Answer one question about images with a compressed cache, and report what was kept.

    Example: foveakv generate --image a.png --image b.png --prompt "What differs?" --method hybridkv --budget 0.1
    """
    from foveakv.cli.progress import EchoStreamer, PrefillBar
    from foveakv.cli.settings import build_method
    from foveakv.engines.transformers.api import compress
    from foveakv.engines.transformers.options import CacheOptions
    from foveakv.evaluation import environment
    from foveakv.models.inputs import build_inputs

    # The command line is checked before the model is loaded.
    files.check_output_files(json)
    chosen = build_method(method, budget, set_ or [])
    chunks: Any = "whole" if prefill_chunk is None else "compress"
    options = CacheOptions(kv_dtype=kv_dtype, residual_length=residual_length, chunks=chunks)
    options.check(chosen)
    images, _ = load_images(image, allow_urls)
    loaded = common.load_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    inputs = build_inputs(loaded.processor, prompt, images, model=loaded.model)
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    started = time.perf_counter()
    with compress(loaded.model, chosen, options=options) as session:
        with PrefillBar(loaded.model):
            sequences = loaded.model.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=EchoStreamer(tokenizer),
                **({} if prefill_chunk is None else {"prefill_chunk_size": prefill_chunk}),
            )  # fmt: skip
        report = session.report
    seconds = time.perf_counter() - started
    common.output().print(report)
    if json is not None:
        tokens = sequences[0, inputs["input_ids"].shape[1] :].tolist()
        result: dict[str, Any] = {
            "prompt": prompt,
            "images": image or [],
            "answer": tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": tokens,
            "seconds": seconds,
            "report": report.to_dict(),
            "environment": environment.describe(loaded.model),
        }
        files.write_json(json, result)
        common.say_written(json)
