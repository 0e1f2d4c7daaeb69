"""The methods and settings that the benchmarks compare, at a common budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foveakv import methods
from foveakv.methods import Method

CORE = ("full", "hae", "hybridkv", "snapkv", "adakv")
ALL = ("full", "fastv", "hae", "hae (DAP only)", "random", "streaming", "h2o", "snapkv", "adakv", "hybridkv")


def at_budget(
    budget: float,
    tokens: int,
    visual_share: float = 0.75,
    *,
    prefill_rows: str | int = "all",
    names: Iterable[str] = ALL,
    digest_dtype: str | None = None,
) -> dict[str, Method]:
    """Build methods that keep about `budget` of a prompt of `tokens` (except fastv, which keeps half by design).

    HAE prunes visual tokens in its deciding layer and then reduces the cache to the budget. `prefill_rows` limits the
    rows that HAE and H2O score, for benchmarks of decoding. `digest_dtype` is an option of hybridkv.
    """
    kept = max(1, int(tokens * visual_share * budget))
    rows = {"prefill_rows": prefill_rows}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "full": ("full", {}),
        "fastv": ("fastv", {}),
        "hae": ("hae", {"budget": budget, "target_visual_tokens": kept, **rows}),
        "hae (DAP only)": ("hae", {"ddes": False, "target_visual_tokens": kept}),
        "hae (64 rows)": ("hae", {"budget": budget, "target_visual_tokens": kept, "prefill_rows": 64}),
        "h2o": ("h2o", {"budget": budget, **rows}),
        "h2o (64 rows)": ("h2o", {"budget": budget, "prefill_rows": 64}),
        "hybridkv": ("hybridkv", {"budget": budget} | ({"digest_dtype": digest_dtype} if digest_dtype else {})),
    }
    made = {}
    for name in names:
        method, options = settings.get(name, (name, {"budget": budget}))
        made[name] = methods.get(method, **options)
    return made
