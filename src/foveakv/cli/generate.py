"""`foveakv generate`: one prompt with one method; the answer as it comes, then the report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from foveakv.cli import common
from foveakv.cli.common import (
    DebugOption,
    DeviceOption,
    DtypeOption,
    ImagesOption,
    KVDtypeOption,
    ModelOption,
    ResidualLengthOption,
    TokensOption,
    TrustOption,
)
from foveakv.util import files


@common.friendly
def generate(
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt", "-p", help="The question. `<image>` marks where each picture goes; else they come first."
        ),
    ],
    model: ModelOption = "demo",
    image: ImagesOption = None,
    method: Annotated[str, typer.Option(help="A method, see `foveakv methods`.")] = "hybridkv",
    budget: Annotated[
        str | None,
        typer.Option("--budget", "-b", help="0.1, 10% (of the prompt), 1024 (tokens per head), 512MiB (whole cache)."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the method as key=value; repeat it for more.")
    ] = None,
    kv_dtype: KVDtypeOption = None,
    residual_length: ResidualLengthOption = 32,
    max_new_tokens: TokensOption = 256,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the answer, the report and the versions here.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Answer one question about pictures with a compressed cache, and report what was kept.

    Example: foveakv generate --image a.png --image b.png --prompt "What differs?" --method hybridkv --budget 0.1
    """
    from foveakv.cli.progress import EchoStreamer, PrefillBar
    from foveakv.cli.settings import build_method
    from foveakv.engines.transformers.options import CacheOptions
    from foveakv.engines.transformers.session import compress
    from foveakv.evaluation import environment
    from foveakv.models.inputs import build_inputs, read_images

    # Everything that can be wrong with the command line is found before the model is loaded.
    files.check_output_files(json)
    chosen = build_method(method, budget, set_ or [])
    options = CacheOptions(kv_dtype=kv_dtype, residual_length=residual_length)
    options.check(chosen)
    pictures = read_images(image or [])
    loaded = common.load_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    inputs = build_inputs(loaded.processor, prompt, pictures, model=loaded.model)
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    started = time.perf_counter()
    with compress(loaded.model, chosen, options=options) as session:
        with PrefillBar(loaded.model):
            sequences = loaded.model.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=EchoStreamer(tokenizer)
            )
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
