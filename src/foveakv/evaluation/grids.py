"""The settings that `foveakv tune --search` draws from: for every method, its options and the values to try.

Values are round numbers around a method's default and its paper's. A method that is not listed has no options to try.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from foveakv.errors import MethodError
from foveakv.methods import find, get
from foveakv.util.values import field_types

_WINDOW = {"window": ("auto", 2, 4, 8, 16, 32), "kernel": ("auto", 1, 3, 5, 7)}

GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "adakv": {**_WINDOW, "floor": (0.1, 0.2, 0.4)},
    "h2o": {"heavy_ratio": (0.25, 0.5, 0.75, 0.9), "per_head_scores": (True, False)},
    "hae": {
        "recent": (None, 0, 8, 16), "recycle_bin_size": (8, 16, 64), "scores": ("own", "shared"),
        "candidates": ("all", "prompt"), "value_norm": (False, True), "prompt_ranking": ("deciding", "own"),
    },
    "hybridkv": {
        "window": ("auto", 4, 8, 16), "theta_quantile": (None, 0.5, 0.7, 0.8), "chunk_size": ("auto", 4, 8, 16),
        "digest_dtype": ("auto", "int8", "int4"), "rho": ("auto", 0.5, 0.75, 0.9), "visual_share": (0.0, 0.5),
    },
    "lookm": {"recent_ratio": (0.25, 0.5, 0.75), "merge": ("pivot", "none"), "visual_share": (0.0, 0.5)},
    "mixkv": {**_WINDOW, "intrinsic": ("value_norm", "key_norm", "none")},
    "prefixkv": {"sink": (1, 4, 8), "recent": (1, 4, 8, 16)},
    "pyramidkv": {**_WINDOW, "beta": (5, 10, 20)},
    "quest": {"page_size": ("auto", 2, 4, 8, 16), "full_layers": (0, 1, 2)},
    "snapkv": {**_WINDOW, "window_share": (0.25, 0.5)},
    "sparsemm": {**_WINDOW, "ratio": (0.1, 0.3, 0.5)},
    "streaming": {"sink": (1, 4, 8, 16)},
    "vlcache": {"threshold": (0.002, 0.01, 0.05), "recent": (0.05, 0.1, 0.2)},
}  # fmt: skip

DRAWS = 200
"""Draws per setting after which no further one is looked for."""


def settings(name: str, trials: int, seed: int = 0, fixed: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The settings of a method to try: the default first, then different draws from its grid.

    Equal arguments give equal settings. There are fewer than `trials` if the grid has fewer.

    Args:
        trials: number of settings, the default included.
        seed: of the draws.
        fixed: options that all settings have.
    """
    fixed = dict(fixed or {})
    grid = {option: values for option, values in GRIDS.get(name, {}).items() if option not in fixed}
    defaults = {option: getattr(get(name, **fixed), option) for option in grid}
    found, seen = [fixed], {tuple(defaults.values())}
    generator = random.Random(f"{seed} {name}")
    for _ in range(DRAWS * trials if grid else 0):
        if len(found) == trials:
            break
        drawn = {option: generator.choice(values) for option, values in grid.items()}
        if tuple(drawn.values()) not in seen:
            seen.add(tuple(drawn.values()))
            own = {option: value for option, value in drawn.items() if value != defaults[option]}
            if _valid(name, {**fixed, **own}):
                found.append({**fixed, **own})
    return found


def searchable() -> list[str]:
    """The methods with a grid that take a budget and need no file."""
    return [name for name in GRIDS if "budget" in field_types(find(name)) and _valid(name, {})]


def _valid(name: str, options: Mapping[str, Any]) -> bool:
    try:
        get(name, **options)
    except MethodError:
        return False
    return True
