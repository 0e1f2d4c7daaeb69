"""`foveakv analyze`: what the two papers' methods rest on, measured on this model and these prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from foveakv.cli import common, prompts
from foveakv.cli.common import DebugOption, DeviceOption, DtypeOption, ImagesOption, ModelOption, TrustOption
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
from foveakv.errors import MethodError
from foveakv.util import files

analyze = typer.Typer(help="Measure what the methods rest on: heads, sparsity, eviction.", no_args_is_help=True)


@analyze.command()
@common.friendly
def heads(
    model: ModelOption = "demo",
    image: ImagesOption = None,
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
    """Head scores and types of HybridKV (Eq. 2-3), and whether they change from prompt to prompt.

    Example: foveakv analyze heads --sample 8 --ask 0 --ask 5 --plot heads.png
    """
    from foveakv.analysis.heads import head_maps
    from foveakv.cli.settings import build_method

    _check_files(json, csv, plot)
    method: Any = build_method("hybridkv", None, set_ or [])
    every = prompts.tasks(model, image, prompt, sample, sample_kind, ask)
    loaded, inputs = prompts.load(model, every, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    result = _measure(lambda progress: head_maps(loaded.model, inputs, method, progress=progress))
    rows = [
        (label, f"{count:,}", f"{share:.0%}", f"{scores.mean():.3f}", f"{scores.min():.3f} - {scores.max():.3f}")
        for label, count, share, scores in zip(
            result.labels, result.tokens, result.static_shares, result.scores, strict=True
        )
    ]
    out = common.output()
    _, layers, kv_heads = result.scores.shape
    title = f"{layers} layers x {kv_heads} KV heads; top-{method.k_ratio:.0%} mass S, static from {_threshold(method)}"
    out.print(_table(title, ("prompt", "tokens", "static", "mean S", "lowest - highest S"), rows))
    if result.pairs:
        pairs = [
            (p.first, p.second, "-" if p.correlation is None else f"{p.correlation:.3f}", f"{p.changed:.1%}")
            for p in result.pairs
        ]
        out.print(_table("between prompts", ("one", "other", "correlation of S", "heads that change type"), pairs))
        out.print(f"{result.steady_share:.1%} of the heads have one type for all prompts", highlight=False)
    _write(result, loaded.model, json, csv, plot, "draw_heads")


@analyze.command()
@common.friendly
def sparsity(
    model: ModelOption = "demo",
    image: ImagesOption = None,
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
    """Sparsity of visual and text attention per layer, and whether layers agree with the first one's evictions (HAE).

    Example: foveakv analyze sparsity --sample 8 --set relative=true --set alpha=none --plot sparsity.png
    """
    from foveakv.analysis.sparsity import PAPER_OVERLAP, THRESHOLD
    from foveakv.analysis.sparsity import sparsity as measure
    from foveakv.cli.settings import build_method

    _check_files(json, csv, plot)
    method: Any = build_method("hae", None, set_ or [])
    every = prompts.tasks(model, image, prompt, sample, sample_kind, ask)
    loaded, inputs = prompts.load(model, every, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    result = _measure(lambda progress: measure(loaded.model, inputs, method, progress=progress))
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
    out.print(_table(f"probabilities <= {THRESHOLD:g} count as none", titles, rows))
    if result.mean_overlap is None:
        out.print(
            "the first layer evicts nothing: these prompts have no visual token below r and alpha. Try --set "
            "relative=true --set alpha=none, or --set target_visual_tokens=0.33",
            highlight=False,
        )
    else:
        out.print(
            f"overlap measured here: {result.mean_overlap:.0%} on average, {result.layers_above_claim:.0%} of the "
            f"other layers reach {PAPER_OVERLAP:.0%}. The paper claims {PAPER_OVERLAP:.0%} for its models.",
            highlight=False,
        )
    _write(result, loaded.model, json, csv, plot, "draw_sparsity")


@analyze.command()
@common.friendly
def eviction(
    model: ModelOption = "demo",
    image: ImagesOption = None,
    prompt: PromptsOption = None,
    sample: SamplesOption = None,
    sample_kind: KindsOption = None,
    ask: AskOption = None,
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="Steady size l: a share of the prompt, or tokens per head.")
    ] = "0.5",
    bins: Annotated[str, typer.Option(help="Capacities D of the recycle bin, separated by commas.")] = "4,16,64",
    recent: Annotated[int, typer.Option(min=0, help="Newest tokens that always stay; 0 is the paper.")] = 0,
    sink: Annotated[int, typer.Option(min=0, help="Oldest tokens that always stay.")] = 0,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=2, help="Tokens to record, past the end of the answer.")
    ] = 96,
    json: JsonOption = None,
    csv: CsvOption = None,
    plot: PlotOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Attention lost by a recycle bin (HAE's DDES) against greedy eviction, replayed on the full cache's attention.

    Example: foveakv analyze eviction --sample 8 --ask -1 --budget 0.5 --bins 4,16 --plot eviction.png
    """
    from foveakv.analysis.eviction import check_settings
    from foveakv.analysis.eviction import eviction as measure
    from foveakv.cli.settings import parse_value

    _check_files(json, csv, plot)
    sizes = _sizes(bins)
    check_settings(sizes, budget, recent, sink)
    steady = parse_value("budget", float | int | str, budget)
    every = prompts.tasks(model, image, prompt, sample, sample_kind, ask)
    loaded, inputs = prompts.load(model, every, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    result = _measure(
        lambda progress: measure(
            loaded.model, inputs, bins=sizes, budget=steady, new_tokens=max_new_tokens, recent=recent, sink=sink,
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
        "D", "at the same", "bin loses", "greedy loses", "traces with bin <= greedy", "by scores when leaving",
        "evicted bin / greedy",
    )  # fmt: skip
    out = common.output()
    steps = ", ".join(map(str, dict.fromkeys(result.steps)))
    out.print(
        _table(f"share of the full cache's attention to tokens that are gone; {steps} decode steps", titles, rows)
    )
    out.print(
        "measured, not promised: a bin of D holds up to D - 1 tokens more at the same steady size", highlight=False
    )
    idle = [str(size) for size in result.settings["bins"] if size > max(result.steps)]
    if idle:
        out.print(f"D = {', '.join(idle)}: never full in so few steps; raise --max-new-tokens", highlight=False)
    _write(result, loaded.model, json, csv, plot, "draw_eviction")


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise MethodError(f"--bins {text!r}: expected whole numbers, separated by commas") from None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _threshold(method: Any) -> str:
    if method.classify != "auto":
        return f"nothing ({method.classify})"
    return f"{method.theta:g}" if method.theta_quantile is None else f"its {method.theta_quantile:g} quantile"


def _check_files(json: Path | None, csv: Path | None, plot: Path | None) -> None:
    files.check_output_files(json, csv, plot)
    common.check_pictures(plot)


def _measure(work: Callable[[Callable[[str], None]], Any]) -> Any:
    with common.messages().status("reading the prompt") as status:
        return work(lambda label: status.update(f"reading {escape(label)}"))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _write(result: Any, model: Any, json: Path | None, csv: Path | None, plot: Path | None, drawing: str) -> None:
    from foveakv.evaluation import environment

    if json is not None:
        files.write_json(json, {**result.to_dict(), "environment": environment.describe(model)})
    if csv is not None:
        prompts.write_csv(csv, result.rows())
    if plot is not None:
        from foveakv.analysis import plots as analysis_plots

        with files.replacing(plot) as temporary:
            getattr(analysis_plots, drawing)(temporary, result)
    for path in (json, csv, plot):
        if path is not None:
            common.say_written(path)
