"""The methods and settings that the benchmarks compare, at a common budget."""

from __future__ import annotations

from foveakv import methods
from foveakv.methods import Method


def at_budget(
    budget: float, tokens: int, visual_share: float = 0.75, *, prefill_rows: str | int = "all"
) -> dict[str, Method]:
    """Every method, set so that about `budget` of a prompt of `tokens` stays (fastv cannot: it keeps half by design).

    HAE prunes visual tokens in the first layer and then brings the cache to the budget. `prefill_rows` bounds the
    rows that HAE and H2O score, for benchmarks of what follows the prompt.
    """
    visual = int(tokens * visual_share)
    made = {
        "full": methods.get("full"),
        "fastv": methods.get("fastv"),
        "hae": methods.get(
            "hae", budget=budget, target_visual_tokens=max(1, int(visual * budget)), prefill_rows=prefill_rows
        ),
        "hae (DAP only)": methods.get("hae", ddes=False, target_visual_tokens=max(1, int(visual * budget))),
    }
    for name in ("random", "streaming", "h2o", "snapkv", "adakv", "hybridkv"):
        extra = {"prefill_rows": prefill_rows} if name == "h2o" else {}
        made[name] = methods.get(name, budget=budget, **extra)
    return made
