"""The texts of a report: what was run, what the figures mean, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foveakv.evaluation.figures import FULL_AT_LEAST
from foveakv.evaluation.report.tables import budget_text
from foveakv.evaluation.stratified import LEVEL
from foveakv.evaluation.summary import Summary

MEANING = (
    "Accuracy is the share of the requested facts that a reply gets right. The full cache is the baseline, and random "
    "tokens are the floor. Intervals are 95% bootstrap intervals over items, and differences use the same items. Total "
    "bytes are those on the compute device and in the host's memory together."
)

_SHOWN = ("torch", "transformers", "foveakv", "python")


def facts(summary: Summary, starts: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(name, value) of everything that a reader needs to repeat the run.

    starts: from run.json, one entry per time that the run was started or resumed.
    """
    plan = summary.plan
    machines = [machine for start in starts for machine in start.get("machines", [])]
    models = [machine["model"] for machine in machines if isinstance(machine.get("model"), dict)]
    model = plan.model
    if models:
        first = models[0]
        size = f", {first['parameters'] / 1e6:,.0f} million parameters" if first.get("parameters") else ""
        parts = (first.get("dtype"), first.get("device"), first.get("attention"))
        model += f" ({first.get('class', '')}{size}, {', '.join(str(part) for part in parts if part)})"
    found = [
        ("model", model),
        ("tasks", f"{len(summary.tasks)}: {', '.join(summary.tasks)}"),
        ("items", f"{plan.items} of each task"),
        ("methods", ", ".join(summary.series)),
        ("budgets", ", ".join(map(budget_text, summary.budgets)) or "none"),
        ("results", _results(summary)),
        ("seed", str(plan.seed)),
        ("machine", "; ".join(dict.fromkeys(map(_machine, machines))) or "not recorded"),
        ("versions", "; ".join(dict.fromkeys(map(_versions, machines))) or "not recorded"),
    ]
    times = [str(start["time"]) for start in starts if start.get("time")]
    if times:
        again = f", resumed {len(times) - 1} times, last {times[-1]}" if len(times) > 1 else ""
        found.append(("started", times[0] + again))
    commands = list(dict.fromkeys(str(start["command"]) for start in starts if start.get("command")))
    if commands:
        found.append(("command", "; then ".join(commands)))
    return found


def warnings(summary: Summary, starts: Sequence[dict[str, Any]] = ()) -> list[str]:
    """What limits the figures. Empty for a complete run on tasks that rank.

    starts: as for `facts`.
    """
    found = []
    mixed = _mixed([machine for start in starts for machine in start.get("machines", [])])
    if mixed:
        found.append(f"Parts of this run used different setups: {'; '.join(mixed)}. Figures may not be comparable.")
    cells = summary.cells.values()
    short = [cell for cell in cells if not cell.complete]
    if short:
        found.append(
            f"This run is incomplete: {len(short)} of {len(summary.cells)} cells (a task with a candidate) have fewer "
            f"items than planned. Every table has the number of items, and differences use common items only."
        )
    failed = sum(len(failure.cases) for failure in summary.failures)
    if failed:
        found.append(f"{failed} of {len(summary.results)} results ended with an error; they are listed under Failures.")
    for state in summary.states.values():
        found += [f"Task {state.name}: {reason}." for reason in state.reasons]
    if summary.full is None:
        found.append("The full cache was not run, so nothing is compared with it and nothing is ranked.")
    elif not summary.ranked:
        found.append("No task can rank methods, so there is no leaderboard.")
    if any(0 < cell.n < 20 for cell in cells):
        found.append("Some cells have fewer than 20 items; their intervals are too narrow.")
    return found


def rules() -> list[str]:
    """How the figures are computed."""
    return [
        f"A task ranks methods if the full cache gets at least {FULL_AT_LEAST:.0%} of its facts, and if the paired "
        f"{LEVEL:.0%} interval of random at the smallest budget minus full is below 0. Other tasks are reported too.",
        "Leaderboards: means over the ranking tasks with equal weights. The rank follows the relative change "
        "against full on the same items; equal changes share a rank. A method that lacks a ranking task has no rank.",
        "An arrow and a colour mark differences whose interval excludes 0: ▲ above, ▼ below. There is no correction "
        "for multiple comparisons.",
        "Same leading tokens: the share of the full cache's reply tokens, counted from the first, that the method "
        "reproduces. KL: mean divergence of the next-token distribution from the full cache's, over the scored "
        "tokens of all items; 0 is equal.",
        "Where all items tie, a bootstrap has no spread. The bounds are then exact: with 95% confidence at most a "
        "share of 1 - 0.05^(1/n) of all items (about 3 / n, the rule of three) differs from the n seen.",
        "Lists whose first item is the first token of the reply are scored without it, because the prefill that "
        "predicts it attends to everything.",
        "Stored and peak bytes: storage on the compute device as a share of a full cache's for the same tokens. Total "
        "bytes add what a method keeps in the host's memory or on disk, as a share of the same. Time "
        "per token: median, over the items on which it was measured, of the time of a decoding step relative to the "
        "full cache's on the same item. Times are noisy if other work runs on the machine.",
        "Results with an error count only under Failures. An interval needs at least two items.",
    ]


def _results(summary: Summary) -> str:
    planned = len(summary.plan.tasks) * len(summary.plan.entries) * summary.plan.items
    good, failed, skipped = (
        sum(getattr(cell, name) for cell in summary.cells.values()) for name in ("n", "failed", "skipped")
    )
    found = [f"{good:,} of {planned:,} planned"]
    if failed:
        found.append(f"{failed:,} with an error")
    if skipped:
        found.append(f"{skipped:,} not applicable (the method drops only visual tokens, and the item has no image)")
    return ", and ".join(found)


def _machine(machine: dict[str, Any]) -> str:
    parts = [machine.get("accelerator"), machine.get("cpu")]
    text = ", ".join(str(part) for part in parts if part)
    threads = machine.get("threads")
    return text + (f", {threads} {'thread' if threads == 1 else 'threads'}" if threads else "")


def _mixed(machines: list[dict[str, Any]]) -> list[str]:
    """What differs between the machines and starts of one run, as texts: versions and the model."""
    found = []
    for name in _SHOWN:
        versions = dict.fromkeys((machine.get("versions") or {}).get(name) for machine in machines)
        if len(versions) > 1:
            found.append(f"{name} was {' and '.join(map(str, versions))}")
    # Folders differ between machines; the last part of the name identifies the model.
    models = [machine["model"] for machine in machines if isinstance(machine.get("model"), dict)]
    for name, what in (("name", "the model"), ("revision", "the model's revision"), ("dtype", "the dtype")):
        values = dict.fromkeys(str(model.get(name)).rpartition("/")[2] for model in models)
        if len(values) > 1:
            found.append(f"{what} was {' and '.join(values)}")
    return found


def _versions(machine: dict[str, Any]) -> str:
    versions = machine.get("versions") or {}
    return ", ".join(f"{name} {versions[name]}" for name in _SHOWN if versions.get(name))
