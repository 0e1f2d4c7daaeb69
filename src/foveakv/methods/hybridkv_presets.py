"""HybridKV's presets, and the checks of its options."""

from __future__ import annotations

from typing import Any

from foveakv.core.budget import parse_budget
from foveakv.errors import MethodError
from foveakv.methods.checks import choice, flag, number, share, whole_number

PRESETS: dict[str, dict[str, Any]] = {
    # What the paper states (arXiv 2604.05887): theta, rho, chunks of 8, the nearest power of two, all text rows; and
    # where it is silent, nothing that bounds it: digests in the model's dtype besides the budget, the whole window.
    "paper": {
        "theta": 0.9,
        "rho": 0.75,
        "chunk_size": 8,
        "window": 32,
        "window_share": 1.0,
        "text_rows": "all",
        "max_text_rows": None,
        "rounding": "nearest",
        "spend_rest": False,
        "min_budget": 1,
        "visual_share": 0.0,
        "digest_dtype": "model",
        "count_digests": False,
    },
    # Deprecated: what suited small models before the defaults adapted to them.
    "small": {
        "theta_quantile": 0.7,
        "rho": 0.75,
        "window": 8,
        "chunk_size": 4,
        "rounding": "down",
        "spend_rest": False,
        "min_budget": 8,
        "visual_share": 0.0,
        "digest_dtype": "int8",
    },
}

_CHOICES = {
    "text_rows": ("after_visual", "all"),
    "rounding": ("chunks", "down", "nearest"),
    "store": ("host", "device", "disk"),
    "digest_dtype": ("auto", "model", "bf16", "int8", "int4"),
    "classify": ("auto", "all_static", "all_dynamic"),
}


def check_options(method: Any) -> None:
    """Raise `MethodError` (or `BudgetError`) if an option of a `HybridKV` is invalid."""
    name = method.name
    parse_budget(method.budget)
    if method.theta != "auto":
        share(name, "theta", method.theta, meaning='the head score from which a head is static; or "auto"')
    if method.theta_quantile is not None:
        share(name, "theta_quantile", method.theta_quantile, meaning="the share of heads that become dynamic")
    share(name, "window_share", method.window_share, above_zero=True, meaning="of the budget, for the window")
    share(name, "visual_share", method.visual_share, meaning="of the slots that text leaves to visual tokens")
    share(name, "alpha", method.alpha, meaning="the share of the static budget that is split evenly")
    share(name, "k_ratio", method.k_ratio, meaning="of the prompt's tokens")
    if method.rho != "auto":
        number(name, "rho", method.rho, 0, meaning='1: dynamic heads get the mean budget; or "auto"')
    for option in ("window", "chunk_size"):
        if getattr(method, option) != "auto":
            whole_number(name, option, getattr(method, option), 1, 'or "auto"')
    if method.max_text_rows is not None:
        whole_number(name, "max_text_rows", method.max_text_rows, 1, "or None: all")
    if method.min_budget is not None:
        whole_number(name, "min_budget", method.min_budget, 1, "or None: the window, at most half of the mean budget")
    for option, known in _CHOICES.items():
        choice(name, option, getattr(method, option), known)
    for option in ("head_level", "type_level", "spend_rest", "count_digests"):
        flag(name, option, getattr(method, option))
    if method.store_dir is not None and method.store != "disk":
        raise MethodError(f'hybridkv: store_dir is used by store="disk" only; got store={method.store!r}')
