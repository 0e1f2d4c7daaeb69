"""`foveakv analyze visual-heads`: measure the head scores that SparseMM needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foveakv.cli import common
from foveakv.cli.common import AllowUrlsOption, DebugOption, DeviceOption, DtypeOption, ModelOption, TrustOption
from foveakv.errors import InputError
from foveakv.util import files


@common.friendly
def visual_heads(
    out: Annotated[Path, typer.Option("--out", "-o", help="The file of head scores, .json or .safetensors.")],
    model: ModelOption = "demo",
    data: Annotated[
        Path | None,
        typer.Option(help="A folder with samples.jsonl; default: cards made for the embedded model."),
    ] = None,
    allow_urls: AllowUrlsOption = False,
    items: Annotated[int, typer.Option(min=1, max=10_000, help="Number of cards, without --data.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the cards.")] = 0,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Maximum length of an answer.")
    ] = 64,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Score every head by how often it attends most to the image that the model is naming (SparseMM).

    Example: foveakv analyze visual-heads --items 64 --out scores.json
    """
    from foveakv.analysis.head_samples import card_samples, read_samples
    from foveakv.analysis.head_scores import save_head_scores, visual_head_scores

    files.check_output_files(out)
    if out.suffix not in (".json", ".safetensors"):
        raise InputError(f"{out}: a file of head scores is named .json or .safetensors")
    samples = card_samples(items, seed) if data is None else read_samples(data, allow_urls=allow_urls)
    loaded = common.load_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    with common.messages().status("answering the samples"):
        scores = visual_head_scores(loaded.model, loaded.processor, samples, max_new_tokens=max_new_tokens)
    save_head_scores(scores, out)
    best = scores.flatten().argsort(descending=True)[:5].tolist()
    heads = ", ".join(f"layer {each // scores.shape[1]} head {each % scores.shape[1]}" for each in best)
    console = common.output()
    console.print(
        f"{len(samples)} samples; {int((scores > 0).sum())} of {scores.numel()} KV heads have a score above 0; "
        f"highest: {heads}",
        highlight=False,
    )
    common.say_written(out)
