"""Reports of made-up results, also with texts that try to become markup."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import synthetic_results as synthetic

from foveakv.evaluation.report.content import Report
from foveakv.evaluation.summary import Summary

EVIL = "<script>alert('x')</script> & \"quotes\" | $5 ${title} `code` *stars*"
START = {
    "time": "2026-01-02T03:04:05+00:00",
    "workers": 1,
    "command": "foveakv eval run --items 4",
    "machines": [
        {
            "cpu": "A Processor",
            "threads": 2,
            "versions": {"torch": "2.13.0", "transformers": "5.24.0", "foveakv": "0.1.0", "python": "3.11.4"},
            "model": {"class": "Llava", "parameters": 158_000_000, "dtype": "float32", "device": "cpu"},
        }
    ],
}


def small(items: int = 4, tasks: tuple[str, ...] = ("needle", "turns"), **values: Any) -> Report:
    plan = synthetic.plan(items, (0.05, 0.5), ("hae", "hybridkv", "quest", "cam", "random"), tasks)
    results = synthetic.results(plan)
    if values:
        results[5] = replace(results[5], **values)
    return Report("small", Summary(plan, results, synthetic.TITLES), [START])


def hostile(place: str) -> str:
    return f"{place}<blink>{EVIL}</blink><img src=x onerror=alert(1)>{{{{ 7 * 7 }}}}{{% raw %}}'\"]]>-->"


def hostile_report() -> Report:
    """Every text that comes from files or models tries to become markup."""
    plan = synthetic.plan(4, (0.05,), ("hae", "hybridkv", "quest", "random"), ("needle", "turns"))
    names = {"needle": hostile("task"), "fastv-own": hostile("label")}
    methods = {"fastv": hostile("method")}
    found = [
        replace(
            result,
            task=names.get(result.task, result.task),
            label=names.get(result.label, result.label),
            method=methods.get(result.method, result.method),
        )
        for result in synthetic.results(plan)
    ]
    found += [replace(found[0], label="other", score=None, error=hostile("error"))]
    entries = [
        replace(entry, label=names.get(entry.label, entry.label), method=methods.get(entry.method, entry.method))
        for entry in plan.entries
    ]
    plan = replace(
        plan, tasks=tuple(names.get(task, task) for task in plan.tasks), entries=tuple(entries), model=hostile("model")
    )
    machine = {
        "cpu": hostile("cpu"), "accelerator": hostile("accelerator"), "versions": {"torch": hostile("torch")},
        "model": {"class": hostile("class"), "dtype": hostile("dtype"), "name": hostile("name")},
    }  # fmt: skip
    start = {"time": hostile("time"), "command": hostile("command"), "machines": [machine, START["machines"][0]]}
    titles = {names["needle"]: hostile("title")}
    return Report(hostile("run"), Summary(plan, found, titles), [start, {**start, "time": hostile("later")}])
