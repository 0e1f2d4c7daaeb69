"""`foveakv analyze eviction`: HAE's recycle bin against greedy eviction."""

from __future__ import annotations

from typing import Annotated

import typer

from foveakv.cli import common
from foveakv.cli.analyze.shared import Given, analysis, figures
from foveakv.errors import MethodError


@analysis
def eviction(
    given: Given,
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="Cache size l: a share of the prompt, or tokens per head.")
    ] = "0.5",
    bins: Annotated[str, typer.Option(help="Capacities D of the recycle bin, separated by commas.")] = "4,16,64",
    recent: Annotated[
        int, typer.Option(min=0, help="Number of newest tokens that are never evicted; 0 as in the paper.")
    ] = 0,
    sink: Annotated[int, typer.Option(min=0, help="Number of oldest tokens that are never evicted.")] = 0,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", "-n", min=2, help="Number of tokens to generate, even after the end of the answer."
        ),
    ] = 96,
) -> None:
    """Compare the attention lost by a recycle bin (HAE's DDES) and by greedy eviction, replayed on the full cache.

    Example: foveakv analyze eviction --sample 8 --ask -1 --budget 0.5 --bins 4,16 --plot eviction.png
    """
    from foveakv.analysis.eviction import check_settings
    from foveakv.analysis.eviction import eviction as run
    from foveakv.analysis.plots_eviction import draw_eviction
    from foveakv.cli.settings import parse_value

    sizes = _sizes(bins)
    check_settings(sizes, budget, recent, sink)
    steady = parse_value("budget", float | int | str, budget)
    result = given.measure(
        lambda model, inputs, progress: run(
            model, inputs, bins=sizes, budget=steady, new_tokens=max_new_tokens, recent=recent, sink=sink,
            progress=progress,
        )
    )  # fmt: skip
    rows = [
        (
            str(r.size),
            r.matched,
            f"{r.lost:.2%}",
            f"{r.greedy_lost:.2%}",
            f"{r.at_most_greedy:.0%} of {r.traces}",
            f"{r.score_at_most_greedy:.0%}",
            f"{r.evicted:.0f} / {r.greedy_evicted:.0f}",
        )
        for r in result.results
    ]
    titles = (
        "D", "at the same", "bin loses", "greedy loses", "traces with bin <= greedy", "the same by scores at eviction",
        "evicted bin / greedy",
    )  # fmt: skip
    out = common.output()
    steps = ", ".join(map(str, dict.fromkeys(result.steps)))
    out.print(
        figures(f"share of the full cache's attention that goes to evicted tokens; {steps} decode steps", titles, rows)
    )
    out.print(
        "a measurement, not a guarantee: a bin of D holds up to D - 1 tokens more at the same steady size. The paper's "
        "Corollary 2.1 sums scores at eviction (Eq. 5), not lost attention",
        highlight=False,
    )
    idle = [str(size) for size in result.settings["bins"] if size > max(result.steps)]
    if idle:
        out.print(f"D = {', '.join(idle)}: never full in this number of steps; raise --max-new-tokens", highlight=False)
    given.write(result, draw_eviction)


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise MethodError(f"--bins {text!r}: expected whole numbers, separated by commas") from None
