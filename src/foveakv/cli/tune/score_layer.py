"""`foveakv tune --score-layer`: the layer in which HAE chooses the visual tokens of all layers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from foveakv.cli import common
from foveakv.cli.tune.budgets import known, percent
from foveakv.errors import InputError
from foveakv.util import files
from foveakv.util.tables import Column, FittedTable

if TYPE_CHECKING:
    from foveakv.cli.tune.request import Request
    from foveakv.evaluation.score_layers import LayerCurve

ALL = "all"


def run(request: Request, layers: str | None, keep: float | None, out: Path | None) -> None:
    """Compare layers on the prompts, print the curve, and write the calibration file."""
    from foveakv.evaluation import score_layers
    from foveakv.evaluation.store import command_line
    from foveakv.evaluation.trial import Bench

    if set(request.options) - {"hae"}:
        raise InputError("--score-layer compares layers of HAE: --set takes options of hae only")
    share = score_layers.KEEP if keep is None else keep
    options = request.options.get("hae", {})
    if own := sorted({"score_layer", "ddes", "target_visual_tokens"} & set(options)):
        raise InputError(f"--score-layer sets {', '.join(own)} itself; leave it out of --set")
    score_layers.hae(0, share, **options)  # checks them before the model is loaded
    wanted = _layers(layers)
    prompts = request.prompts(builtin=True)
    loaded = request.load()
    depth = score_layers.depth_of(loaded.model)
    with common.messages().status("reading the prompts") as status:
        curve = score_layers.find_layer(
            Bench(loaded, time_every=0), prompts, depth, keep=share,
            layers=list(range(depth)) if layers == ALL else wanted,
            make=lambda layer: score_layers.hae(layer, share, **options),
            progress=lambda done, total: status.update(f"prompt {done + 1} of {total}"),
        )  # fmt: skip
    _print(curve)
    written = score_layers.save(
        curve, loaded.model, request.model, options, command_line(without=("--out", "-o", "--json")), out
    )
    if request.json is not None:
        files.write_json(request.json, _plain(curve, request.model, options, written))
    common.say_written(written, request.json)


def _layers(text: str | None) -> list[int] | None:
    """Read --layers; None if there are no numbers to read. InputError: it is neither `all` nor numbers."""
    from foveakv.cli.settings import split_names

    if text is None or text == ALL:
        return None
    try:
        return [int(part) for part in split_names(text, "layers")]
    except ValueError:
        raise InputError(f"--layers is `all`, or numbers of layers separated by commas; got {text!r}") from None


def _print(curve: LayerCurve) -> None:
    out = common.output()
    table = FittedTable(
        [Column("layer"), *map(Column, ("KL, nats per token", "tokens that differ", "others' choice kept", "")) ],
        title=f"visual tokens chosen by one of {curve.depth} layers, {percent(curve.keep, 0)} kept, agreement with the "
        f"full cache on {curve.prompts} prompt{'s' if curve.prompts != 1 else ''}",
        caption="KL: with 95% interval over prompts; others' choice kept: of the tokens that other layers would choose",
    )  # fmt: skip
    for found in curve.figures:
        chosen = found.layer == curve.chosen
        bounds = f" [{found.kl.low:.4f}, {found.kl.high:.4f}]" if found.kl.known else ""
        table.add(
            str(found.layer), f"{found.kl.mean:.4f}{bounds}", percent(found.differs.mean, 1),
            percent(found.own_kept, 0), "chosen" if chosen else "", style="bold" if chosen else "",
        )  # fmt: skip
    out.print(table)
    for reason in dict.fromkeys(curve.skipped):
        out.print(f"* left out: {escape(reason)}", highlight=False, soft_wrap=True)
    out.print(
        'foveakv.compress(model, foveakv.methods.get("hae", score_layer="calibrated"))',
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip


def _plain(curve: LayerCurve, model: str, options: dict[str, Any], written: Path) -> dict[str, Any]:
    from foveakv.evaluation import environment

    return {
        "model": model, "options": options, "keep": curve.keep, "depth": curve.depth, "prompts": curve.prompts,
        "chosen": curve.chosen, "file": str(written), "environment": environment.describe(),
        "layers": [
            {
                "layer": found.layer, "kl": known(found.kl.mean), "kl_low": known(found.kl.low),
                "kl_high": known(found.kl.high), "differs": known(found.differs.mean),
                "own_kept": known(found.own_kept), "tokens": found.scored,
            }
            for found in curve.figures
        ],
    }  # fmt: skip
