"""`foveakv analyze heads`: HybridKV's head scores and types, and the attention of heads while decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from foveakv.cli import common
from foveakv.cli.analyze.shared import Given, analysis, figures
from foveakv.cli.common import IgnoreEosOption
from foveakv.cli.prompts import SetOption


@analysis
def heads(
    given: Given,
    set_: SetOption = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Also count the tokens that each head attends to while decoding.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=2, help="With --decode: maximum number of tokens to generate.")
    ] = 501,
    ignore_eos: IgnoreEosOption = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also show types and budgets for other values of theta and rho.")
    ] = False,
) -> None:
    """Measure the head scores and types of HybridKV (Eq. 2-3), how much they change between prompts, and what they
    say about decoding.

    Example: foveakv analyze heads --sample 8 --ask 0 --ask 5 --plot heads.png
    """
    from foveakv.analysis import head_sweep
    from foveakv.analysis.focus import focus
    from foveakv.analysis.heads import head_maps
    from foveakv.analysis.plots_heads import draw_heads
    from foveakv.cli.settings import build_method

    method: Any = build_method("hybridkv", None, set_ or [])
    if sweep:
        head_sweep.check_budget(method)

    def work(model: Any, inputs: Any, progress: Any) -> Any:
        maps = head_maps(model, inputs, method, progress=progress)
        tokens = max_new_tokens if decode else 1
        return focus(model, inputs, maps, method, new_tokens=tokens, to_the_end=ignore_eos, progress=progress)

    found = given.measure(work)
    out = common.output()
    _print_maps(out, found.maps, method)
    out.print(_curves(found))
    if decode:
        _print_focus(out, found)
    if sweep:
        found = replace(found, points=tuple(head_sweep.sweep(found.maps, method)))
        out.print(_sweep(found.points))
    given.write(found, draw_heads)


def _print_maps(out: Any, result: Any, method: Any) -> None:
    rows = [
        (label, f"{count:,}", f"{share:.0%}", f"{scores.mean():.3f}", f"{scores.min():.3f} - {scores.max():.3f}")
        for label, count, share, scores in zip(
            result.labels, result.tokens, result.static_shares, result.scores, strict=True
        )
    ]
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


def _curves(found: Any) -> Any:
    from foveakv.analysis.focus import SHARES

    shown = [i for i, share in enumerate(SHARES) if share <= 0.5]
    rows = []
    for name, static in (("static", True), ("dynamic", False)):
        values = [found.class_mean(found.curves[..., i], static) for i in shown]
        rows.append((name, *("-" if value is None else f"{value:.0%}" for value in values)))
    titles = ("heads", *(f"{SHARES[i]:.0%}" for i in shown))
    return figures("attention of the prompt's text in the top x % of the keys", titles, rows)


def _print_focus(out: Any, found: Any) -> None:
    types = (True, False)
    rows = [
        (
            label,
            str(steps),
            str(k),
            *(_shown(found.class_mean(found.final, static, p), ".1f") for static in types),
            _interval(found.correlations[p]),
            *(_shown(found.class_mean(found.coverage, static, p), ".0%") for static in types),
        )
        for p, (label, steps, k) in enumerate(zip(found.maps.labels, found.steps, found.k, strict=True))
    ]
    titles = (
        "prompt", "decode steps", "k", "count / k, static heads", "dynamic heads", "rank correlation with S",
        "covered, static heads", "dynamic heads",
    )  # fmt: skip
    out.print(figures("cumulative focus count: distinct tokens among a head's top k, over all steps", titles, rows))
    out.print(
        f"rank correlation with S, means over prompts: focus count {_interval(found.correlation)}, covered "
        f"{_interval(found.covered_correlation)} (95% bootstrap interval over heads). The paper's claim: negative and "
        "positive. Covered: attention to the prompt on the k tokens that the prompt's text attends to most",
        highlight=False,
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(found: Any) -> str:
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"


def _sweep(points: Any) -> Any:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    rows = [
        (
            f"theta {point.theta:g}" if point.theta is not None else f"rho {point.rho:g}",
            f"{point.static_share:.0%}",
            *map(share, (point.static_slots, point.dynamic_slots, point.static_each, point.dynamic_each)),
        )
        for point in points
    ]
    titles = (
        "setting", "static heads", "budget to static", "to dynamic", "a static head, of the prompt", "a dynamic head",
    )  # fmt: skip
    return figures("types and budgets (Eq. 4 and 5) for other values of theta and rho", titles, rows)


def _threshold(method: Any) -> str:
    if method.classify != "auto":
        return f"nothing ({method.classify})"
    if method.theta_quantile is not None:
        return f"its {method.theta_quantile:g} quantile"
    return "a score that suits the prompt (theta=auto)" if method.theta == "auto" else f"{method.theta:g}"
