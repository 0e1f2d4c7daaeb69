"""`foveakv analyze heads`: HybridKV's head scores and types."""

from __future__ import annotations

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
def heads(
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
    """Measure the head scores and types of HybridKV (Eq. 2-3), and how much they change between prompts.

    Example: foveakv analyze heads --sample 8 --ask 0 --ask 5 --plot heads.png
    """
    from foveakv.analysis.heads import head_maps
    from foveakv.cli.settings import build_method

    check_files(json, csv, plot)
    method: Any = build_method("hybridkv", None, set_ or [])
    every = prompts.tasks(model, image, prompt, sample, sample_kind, ask, allow_urls=allow_urls)
    loaded, inputs = prompts.load(model, every, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    result = measure(lambda progress: head_maps(loaded.model, inputs, method, progress=progress))
    rows = [
        (label, f"{count:,}", f"{share:.0%}", f"{scores.mean():.3f}", f"{scores.min():.3f} - {scores.max():.3f}")
        for label, count, share, scores in zip(
            result.labels, result.tokens, result.static_shares, result.scores, strict=True
        )
    ]
    out = common.output()
    _, layers, kv_heads = result.scores.shape
    title = (
        f"{layers} layers x {kv_heads} KV heads; S: attention of the top {method.k_ratio:.0%}; "
        f"static from {_threshold(method)}"
    )
    out.print(figures(title, ("prompt", "tokens", "static", "mean S", "lowest - highest S"), rows))
    if result.pairs:
        pairs = [
            (p.first, p.second, "-" if p.correlation is None else f"{p.correlation:.3f}", f"{p.changed:.1%}")
            for p in result.pairs
        ]
        out.print(figures("between prompts", ("one", "other", "correlation of S", "heads that change type"), pairs))
        out.print(f"{result.steady_share:.1%} of the heads have one type for all prompts", highlight=False)
    write(result, loaded.model, json, csv, plot, "draw_heads")


def _threshold(method: Any) -> str:
    if method.classify != "auto":
        return f"nothing ({method.classify})"
    if method.theta_quantile is not None:
        return f"its {method.theta_quantile:g} quantile"
    return "a score that suits the prompt (theta=auto)" if method.theta == "auto" else f"{method.theta:g}"
