"""`foveakv analyze sparsity`: the observations that HAE builds on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import typer

from foveakv.cli import common
from foveakv.cli.analyze.shared import Given, analysis, figures
from foveakv.cli.prompts import SetOption

MOST_LAYERS = 16  # rows of the table of deciding layers


@analysis
def sparsity(
    given: Given,
    set_: SetOption = None,
    per: Annotated[
        str,
        typer.Option(
            help="Divisor of the sparsity: `visible` pairs of row and column, or `all` of them (the paper's)."
        ),
    ] = "visible",
    share: Annotated[float, typer.Option(help="Share of the visual tokens that the deciding layer keeps.")] = 0.15,
) -> None:
    """Measure the sparsity of attention, what other layers would evict (HAE), and each layer as the one that decides.

    Example: foveakv analyze sparsity --sample 8 --set alpha=none --plot sparsity.png
    """
    from foveakv.analysis.plots_sparsity import draw_sparsity
    from foveakv.analysis.sparsity import PAPER_OVERLAP, check_settings
    from foveakv.analysis.sparsity import sparsity as run
    from foveakv.cli.settings import build_method

    method: Any = build_method("hae", None, set_ or [])
    check_settings(method, per, share)
    result = given.measure(
        lambda model, inputs, progress: run(
            model, inputs, method, per=cast(Literal["visible", "all"], per), share=share, progress=progress
        )
    )
    out = common.output()
    out.print(_attention(result))
    out.print(_overlaps(result))
    if result.mean_overlap is None:
        out.print(
            "the first layer evicts nothing: no visual token of these prompts is below r and alpha. Try --set "
            "alpha=none, or --set target_visual_tokens=0.33",
            highlight=False,
        )
    else:
        out.print(
            f"by the same rule the other layers also make {result.mean_rule_overlap:.0%} of the first layer's "
            f"evictions (chance {result.mean_rule_chance:.0%}), of the same number {result.mean_overlap:.0%} (chance "
            f"{result.mean_chance:.0%}); {result.layers_above_claim:.0%} of the layers reach {PAPER_OVERLAP:.0%} by "
            "the same rule. The paper's 90% is that of Phi-3.5-Vision (90.43%).",
            highlight=False,
        )
    out.print(_deciding(result))
    if any(len(found.deciding["sum"].images[0]) > 1 for found in result.prompts):
        out.print(_images(result))
    given.write(result, draw_sparsity)


def _attention(result: Any) -> Any:
    from foveakv.analysis.sparsity import THRESHOLD

    rows = [
        (
            found.label,
            f"{found.visual[0]:.0%} / {found.text[0]:.0%}",
            f"{_mean(found.visual):.0%} / {_mean(found.text):.0%}",
            f"{found.overall[0]:.0%} / {_mean(found.overall):.0%}",
            f"{found.visual_variance[0]:.2g} / {found.text_variance[0]:.2g}",
        )
        for found in result.prompts
    ]
    titles = (
        "prompt", "visual / text, first layer", "mean of layers", "overall, first layer / mean",
        "variance of a_j visual / text, first layer",
    )  # fmt: skip
    of = "visible pairs" if result.per == "visible" else "all pairs (the paper's)"
    return figures(f"sparsity: attention weights <= {THRESHOLD:g}, share of {of}", titles, rows)


def _overlaps(result: Any) -> Any:
    rows = []
    for found in result.prompts:
        by_rule, by_number = (found.rule_overlap or [])[1:], (found.overlap or [])[1:]
        rows.append(
            (
                found.label,
                f"{found.evicted} of {found.visual_tokens}",
                _range(by_rule),
                f"{_mean(found.rule_chance[1:]):.0%}" if by_rule else "-",
                _range(by_number),
                f"{found.chance:.0%}",
                f"{_mean(found.lost):.1%}",
            )
        )
    titles = (
        "prompt", "first layer evicts", "others too, same rule", "by chance", "same number", "by chance",
        "attention lost",
    )  # fmt: skip
    return figures("evictions of the first layer that the other layers would make too", titles, rows)


def _deciding(result: Any) -> Any:
    from foveakv.analysis.viz_shown import evenly

    by = result.deciding
    kept = by["sum"].kept
    rows = [
        (
            str(result.layers[i]),
            *(f"{by[rows].best[i]:.0%}" for rows in by),
            *(f"{by[rows].lost[i]:.0%}" for rows in by),
        )
        for i in evenly(len(result.layers), MOST_LAYERS)
    ]
    titles = ("layer that decides", "best tokens kept, sum", "mean", "attention lost, sum", "mean")
    return figures(
        f"one layer chooses {kept:.0%} of the visual tokens for all layers (by chance: {kept:.0%} of the best tokens)",
        titles,
        rows,
    )


def _images(result: Any) -> Any:
    rows = []
    for found in result.prompts:
        chosen = [each.images[0] for each in found.deciding.values()]
        rows.append((found.label, *(f"{kept[i]:.0%}" for i in (0, -1) for kept in chosen)))
    titles = ("prompt", "first image, sum", "mean", "last image, sum", "mean")
    return figures("tokens of the first and the last image that the first layer's choice keeps", titles, rows)


def _range(values: Sequence[float]) -> str:
    return f"{_mean(values):.0%} ({min(values):.0%} - {max(values):.0%})" if values else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
