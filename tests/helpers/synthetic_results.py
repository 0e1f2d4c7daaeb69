"""Made-up results of a big run: 17 methods at four budgets on seven tasks, with faults of all kinds."""

from __future__ import annotations

from typing import Any

import numpy as np

from foveakv.evaluation.plan import Entry, Plan
from foveakv.evaluation.results import Result, TurnResult

BUDGETS = (0.05, 0.1, 0.2, 0.5)
METHODS = (
    "hae", "hybridkv", "snapkv", "adakv", "h2o", "streaming", "fastv", "pyramidkv", "tova", "keydiff", "expected",
    "lagkv", "cam", "quest", "vlcache", "random",
)  # fmt: skip
TASKS = ("digit-one", "digit-all", "needle", "turns", "words", "hard", "blind")
TITLES = {task: f"What the task {task} asks" for task in TASKS}
HEADS = (30, 3)


def plan(
    items: int = 24,
    budgets: tuple[float, ...] = BUDGETS,
    methods: tuple[str, ...] = METHODS,
    tasks: tuple[str, ...] = TASKS,
) -> Plan:
    entries = [Entry("full", "full", {"method": "full"}), Entry("fastv-own", "fastv", {"method": "fastv"})]
    entries += [
        Entry(f"{method} {budget}", method, {"method": method, "budget": budget})
        for method in methods
        for budget in budgets
    ]
    return Plan(tasks, tuple(entries), items, seed=7)


def results(chosen: Plan, seed: int = 0) -> list[Result]:
    """Better methods lose less; `hard` is too hard for the full cache, and on `blind` nothing is lost at all."""
    generator = np.random.default_rng(seed)
    found = []
    for task in chosen.tasks:
        for item in range(chosen.items):
            base = float(generator.random() < (0.6 if task == "hard" else 0.97))
            for place, entry in enumerate(chosen.entries):
                found.append(_result(task, item, base, place, entry, generator, chosen.seed))
    return found


def _result(
    task: str, item: int, base: float, place: int, entry: Entry, generator: np.random.Generator, seed: int
) -> Result:
    budget = entry.settings.get("budget")
    who: dict[str, Any] = {
        "task": task, "item": item, "seed": seed, "method": entry.method, "budget": budget, "label": entry.label,
        "settings": entry.settings,
    }  # fmt: skip
    if entry.method == "quest" and item % 9 == 4 and task == "needle":
        return Result(**who, error="UnsupportedModeError: <b>no pages</b> of this shape & size; use another `kernel`")
    if entry.method == "cam" and task == "turns" and budget == 0.05:
        return Result(**who, error="RuntimeError: a later turn found no slot")
    share = budget or 1.0
    quality = 0.35 if entry.method == "random" else 0.985 - 0.012 * (place // len(BUDGETS))
    keep = 1.0 if entry.method == "full" or task == "blind" else quality ** (0.35 / share)
    facts = 4
    right = base * float(generator.binomial(facts, keep)) / facts
    loss = 0.0 if entry.method == "full" else float(generator.exponential(0.02 / share * (1.2 - quality)))
    stored = 1.0 if entry.method == "full" else min(1.0, share * 1.05 + 0.01)
    step = 0.011 * (0.35 + 0.65 * stored) * float(generator.normal(1, 0.05))
    store = entry.method in ("hybridkv", "quest")
    static = (np.add.outer(np.arange(HEADS[0]), 7 * np.arange(HEADS[1])) * (item + 3) % 11 > 5).astype(int)
    return Result(
        **who,
        score=right,
        turns=(TurnResult("<image> Which?", "a reply", "4; 2; 1; 7", right, facts, 8),),
        match=keep,
        kl=loss,
        scored=7,
        log_likelihood=-0.2 - loss if task == "words" else None,
        context=600,
        stored_bytes=int(stored * 27_000_000),
        full_bytes=27_000_000,
        host_bytes=20_000_000 if store else 0,
        peak_bytes=int((0.4 + 0.6 * stored) * 27_000_000),
        retrieved=5200 if store else 0,
        hits=4100 if store else 0,
        token_seconds=step,
        prefill_seconds=0.01,
        details={"static_heads": static.tolist()} if entry.method == "hybridkv" else None,
    )
