"""The options of `foveakv tune`, and which of them belong to which form of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foveakv.cli import common
from foveakv.cli.common import AllowUrlsOption, DebugOption, DeviceOption, DtypeOption, ModelOption, TrustOption
from foveakv.errors import InputError
from foveakv.util import files

METHODS = "hae,hybridkv,snapkv"


@common.friendly
def tune(
    data: Annotated[
        Path | None, typer.Option(help='A folder with prompts.jsonl: {"prompt": "...", "images": ["a.png"]}.')
    ] = None,
    allow_urls: AllowUrlsOption = False,
    model: ModelOption = "demo",
    score_layer: Annotated[
        bool, typer.Option("--score-layer", help="Find the layer in which HAE chooses visual tokens, and store it.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Compare defaults with the best of equally many settings per method.")
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(help="Evaluation tasks, separated by commas, instead of --data; use those ending in @validation."),
    ] = None,
    items: Annotated[
        int | None, typer.Option(min=2, max=100_000, help="With --tasks: number of items per task (default: 8).")
    ] = None,
    methods: Annotated[str | None, typer.Option(help=f"Methods, separated by commas (default: {METHODS}).")] = None,
    budgets: Annotated[
        str | None,
        typer.Option(help="Budgets to try, separated by commas (default: 0.02 to 0.7; with --search 0.05,0.1,0.2)."),
    ] = None,
    max_loss: Annotated[
        float, typer.Option(help="Largest share of reply tokens that may differ, as an upper bound over the prompts.")
    ] = 0.01,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=2, help="Maximum length of a reply, in tokens.")
    ] = 64,
    layers: Annotated[
        str | None,
        typer.Option(help="--score-layer: layers to try, separated by commas, or `all` (default: coarse, then fine)."),
    ] = None,
    keep: Annotated[
        float | None, typer.Option(help="--score-layer: share of visual tokens that is kept (default: 0.15).")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=2, max=1000, help="--search: number of settings per method (default: 8).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="--search with --tasks: number of processes (default: 1).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="--score-layer: the calibration file (default: where HAE looks for it). --search with --tasks: the "
            "folder of its runs; the same command resumes them.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="An option as method.key=value. Repeat it for several.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap, of items and of drawn settings.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this JSON file.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Choose a budget, HAE's deciding layer, or settings, by agreement with the full cache on your own prompts.

    By default: the smallest budget per method whose replies agree with the full cache.

    Example: foveakv tune --model demo --data prompts --max-loss 0.01
    """  # fmt: skip
    from foveakv.cli.settings import parse_budgets, parse_options, split_names
    from foveakv.cli.tune import budgets as budgets_form
    from foveakv.cli.tune import score_layer as score_layer_form
    from foveakv.cli.tune import search as search_form
    from foveakv.cli.tune.request import Request

    if score_layer and search:
        raise InputError("--score-layer and --search are different commands; give one of them")
    _belongs("--score-layer", score_layer, {"--layers": layers, "--keep": keep})
    _belongs("--search", search, {"--trials": trials, "--workers": workers})
    _belongs("--score-layer or --search", score_layer or search, {"--tasks": tasks, "--items": items, "--out": out})
    if score_layer and (methods or budgets):
        raise InputError(
            "--score-layer compares layers of HAE at one share of tokens; leave --methods and --budgets out"
        )
    files.check_output_files(json, out if score_layer else None)
    request = Request(
        model, data, allow_urls, split_names(tasks, "tasks") if tasks else None, items, max_new_tokens,
        parse_options(set_ or []), seed, json,
        {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code},
    )  # fmt: skip
    if score_layer:
        score_layer_form.run(request, layers, keep, out)
        return
    values = parse_budgets(split_names(budgets, "budgets")) if budgets else None
    if search:
        names = split_names(methods, "methods") if methods else None
        search_form.run(request, names, values, trials or search_form.TRIALS, workers or 1, out)
        return
    budgets_form.run(request, max_loss, split_names(methods or METHODS, "methods"), values)


def _belongs(flag: str, given: bool, options: dict[str, Any]) -> None:
    """InputError: an option is given without the flag that it belongs to."""
    for name, value in options.items():
        if value is not None and not given:
            raise InputError(f"{name} belongs to {flag}; give that too, or leave {name} out")
