"""`foveakv analyze sparsity`: the observations that HAE builds on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foveakv.cli import common, prompts
from foveakv.cli.analyze.shared import check_files, figures, measure, write
from foveakv.cli.common import (
    AllowUrlsOption,
    DebugOption,
    DeviceOption,
    DtypeOption,
    ImagesOption,
    ModelOption,
    TrustOption,
)
from foveakv.cli.prompts import (
    AskOption,
    CsvOption,
    JsonOption,
    KindsOption,
    PlotOption,
    PromptsOption,
    SamplesOption,
    SetOption,
)


@common.friendly
def sparsity(
    model: ModelOption = "demo",
    image: ImagesOption = None,
    allow_urls: AllowUrlsOption = False,
    prompt: PromptsOption = None,
    sample: SamplesOption = None,
    sample_kind: KindsOption = None,
    ask: AskOption = None,
    set_: SetOption = None,
    json: JsonOption = None,
    csv: CsvOption = None,
    plot: PlotOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure the sparsity of visual and text attention, and how far layers agree with the first one's evictions (HAE).

    Example: foveakv analyze sparsity --sample 8 --set relative=true --set alpha=none --plot sparsity.png
    """
    from foveakv.analysis.sparsity import PAPER_OVERLAP, THRESHOLD
    from foveakv.analysis.sparsity import sparsity as run
    from foveakv.cli.settings import build_method

    check_files(json, csv, plot)
    method: Any = build_method("hae", None, set_ or [])
    every = prompts.tasks(model, image, prompt, sample, sample_kind, ask, allow_urls=allow_urls)
    loaded, inputs = prompts.load(model, every, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    result = measure(lambda progress: run(loaded.model, inputs, method, progress=progress))
    rows = []
    for found in result.prompts:
        others = (found.overlap or [])[1:]
        overlap = f"{_mean(others):.0%} ({min(others):.0%} - {max(others):.0%})" if others else "-"
        rows.append(
            (
                found.label,
                f"{found.visual[0]:.0%} / {found.text[0]:.0%}",
                f"{_mean(found.visual):.0%} / {_mean(found.text):.0%}",
                f"{found.evicted} of {found.visual_tokens}",
                overlap,
                f"{found.chance:.0%}",
                f"{_mean(found.lost):.1%}",
            )
        )
    titles = (
        "prompt", "sparsity visual / text, first layer", "all layers", "first layer evicts", "others' overlap",
        "by chance", "attention lost",
    )  # fmt: skip
    out = common.output()
    out.print(figures(f"sparsity: share of attention weights <= {THRESHOLD:g}", titles, rows))
    if result.mean_overlap is None:
        out.print(
            "the first layer evicts nothing: no visual token of these prompts is below r and alpha. Try --set "
            "relative=true --set alpha=none, or --set target_visual_tokens=0.33",
            highlight=False,
        )
    else:
        out.print(
            f"overlap measured here: {result.mean_overlap:.0%} on average, {result.layers_above_claim:.0%} of the "
            f"other layers reach {PAPER_OVERLAP:.0%}. The paper claims {PAPER_OVERLAP:.0%} for its models.",
            highlight=False,
        )
    write(result, loaded.model, json, csv, plot, "draw_sparsity")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
