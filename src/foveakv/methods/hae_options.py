"""Checks of HAE's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from foveakv.core.budget import parse_budget
from foveakv.errors import MethodError
from foveakv.methods import checks
from foveakv.methods.prompt_scores import check_rows
from foveakv.methods.score_layers import check_layers

# Options that have an effect with one of the two stages only.
STAGES: dict[str, tuple[str, ...]] = {
    "dap": (
        "r", "alpha", "relative", "c", "target_visual_tokens", "criterion", "variance_quantile", "drop_hidden_states",
        "statistics", "rows", "early_layers", "prompt_ranking",
    ),
    "ddes": (
        "budget", "recycle_bin_size", "candidates", "scores", "mode", "restore", "score", "frequency_weight", "recent",
        "sink", "compress_prompt", "per_head_scores", "prefill_rows",
    ),
}  # fmt: skip
_FLAGS = ("dap", "ddes", "relative", "drop_hidden_states", "compress_prompt", "statistics", "value_norm")
_CHOICES: dict[str, tuple[str, ...]] = {
    "rows": ("mean", "sum"),
    "early_layers": ("wait", "first", "own"),
    "candidates": ("all", "prompt"),
    "scores": ("own", "shared"),
    "prompt_ranking": ("deciding", "own"),
}


def of_stages(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those of a stage that `options` disable."""
    disabled = [option for stage, names in STAGES.items() if options.get(stage) is False for option in names]
    return {option: value for option, value in settings.items() if option not in disabled}


def check_options(method: Any) -> None:
    """Raise `MethodError` unless the options of a `foveakv.methods.hae.HAE` are valid and fit each other."""
    for option in _FLAGS:
        checks.flag("hae", option, getattr(method, option))
    if not method.dap and not method.ddes:
        raise MethodError("hae: dap=False and ddes=False leaves nothing to do; use the method 'full' instead")
    check_layers("hae", "score_layer", method.score_layer)
    for option, choices in _CHOICES.items():
        checks.choice("hae", option, getattr(method, option), choices)
    if method.budget is not None:
        parse_budget(method.budget)
        if not method.ddes:
            raise MethodError(
                "hae: budget is the steady size of DDES; with ddes=False use target_visual_tokens, r and alpha"
            )
    if method.recent is not None:
        checks.whole_number("hae", "recent", method.recent, 0, "newest tokens that are always kept")
    check_rows("hae", method.prefill_rows)
    changed = {each.name for each in fields(method) if each.init and getattr(method, each.name) != each.default}
    for stage, options in STAGES.items():
        for option in options:
            if option in changed and not getattr(method, stage):
                raise MethodError(
                    f"hae: {option}={getattr(method, option)!r} is an option of {stage.upper()} and needs {stage}=True"
                )
    if method.scores == "shared":
        for option in ("early_layers", "mode", "score", "per_head_scores"):
            if option in changed:
                raise MethodError(
                    f"hae: scores='shared' gives all layers one set of tokens; leave {option} at its default"
                )
