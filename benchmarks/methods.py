"""The methods and settings that the benchmarks compare, at a common budget."""

from __future__ import annotations

from foveakv import methods
from foveakv.methods import Method


def at_budget(budget: float, tokens: int, visual_share: float = 0.75) -> dict[str, Method]:
    """Every method, set so that about `budget` of a prompt of `tokens` stays (fastv cannot: it keeps half by design).

    HAE prunes visual tokens in the first layer and then brings the cache to the budget.
    """
    visual = int(tokens * visual_share)
    made = {
        "full": methods.get("full"),
        "fastv": methods.get("fastv"),
        "hae": methods.get("hae", budget=budget, target_visual_tokens=max(1, int(visual * budget))),
        "hae (DAP only)": methods.get("hae", ddes=False, target_visual_tokens=max(1, int(visual * budget))),
    }
    for name in ("random", "streaming", "h2o", "snapkv", "adakv", "hybridkv"):
        made[name] = methods.get(name, budget=budget)
    return made
