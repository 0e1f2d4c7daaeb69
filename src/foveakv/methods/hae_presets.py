"""The published settings of HAE (arXiv 2602.02197)."""

from __future__ import annotations

from typing import Any

# What all of the paper's runs have in common: the first layer decides by sums over text rows (Eq. 1-3), victims come
# from the set left after the prefill (Eq. 4), and no token is protected.
PAPER: dict[str, Any] = {
    "score_layer": 0,
    "rows": "sum",
    "value_norm": False,
    "relative": False,
    "r": 0.0012,
    "alpha": 0.001,
    "recycle_bin_size": 64,
    "recent": 0,
    "sink": 0,
    "candidates": "prompt",
    # Its prefill alone takes 0.21 s instead of 0.58 s, which evictions from the cache cannot do.
    "drop_hidden_states": True,
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": PAPER,
    "llava-1.5": PAPER,
    # Table 3's 956(56) has no star, so it is a fixed KV size.
    "phi-3.5-vision": {**PAPER, "r": 0.0015, "alpha": 0.0015, "recycle_bin_size": 56, "budget": 956},
    "phi-3.5-vision-story": {**PAPER, "r": 0.0005, "alpha": 0.0005, "recycle_bin_size": 128, "budget": 1024},
}
