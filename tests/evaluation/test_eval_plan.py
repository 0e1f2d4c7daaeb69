"""Plans: order, JSON, what may be added, and the baselines that are always there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fake_bench
import pytest

from foveakv import methods
from foveakv.errors import FoveaKVError, InputError, MethodError
from foveakv.evaluation.compare import Candidate, candidates
from foveakv.evaluation.plan import Entry, Plan, with_baselines

LOG = Path("log")


def labels(found: list[Candidate]) -> list[str]:
    return [each.label for each in found]


def test_items_are_outermost_and_what_is_done_is_left_out() -> None:
    plan = fake_bench.plan(LOG, count=2)
    assert [(unit.number, unit.task) for unit in plan.units()] == [
        (0, "fake-a"), (0, "fake-b"), (1, "fake-a"), (1, "fake-b"),
    ]  # fmt: skip
    keys = list(plan.keys())
    assert len(keys) == len(set(keys)) == 2 * 2 * 7
    left = plan.units(set(keys[:8]))
    assert len(left) == 3
    assert left[0].labels == plan.units()[1].labels[1:]
    assert plan.units(set(keys)) == []


def test_settings_that_cannot_be_written_down_are_refused() -> None:
    method = methods.get("sparsemm", head_scores=[[1.0, 0.0]])
    with pytest.raises(InputError, match="head_scores is a list"):
        Entry.of(Candidate("sparsemm", method))


@pytest.mark.parametrize("name", methods.available())
def test_every_method_comes_back_from_json(name: str) -> None:
    try:
        method = methods.get(name)
    except FoveaKVError as error:
        pytest.skip(f"has no defaults: {error}")
    entry = Entry.of(Candidate("x", method))
    back = Entry(**json.loads(json.dumps(vars(entry))))
    assert back.candidate() == Candidate("x", method)


def test_json_round_trip() -> None:
    chosen = candidates(["hybridkv", "hae"], [0.1, "25%", 64], {"hybridkv": {"classify": "all_static"}})
    plan = Plan.of(["fake-b"], with_baselines(chosen), 7, seed=3, model="demo", dtype="bfloat16", device="cuda")
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    with pytest.raises(InputError, match="format 99"):
        Plan.from_dict({**plan.to_dict(), "format": 99})


def test_baselines() -> None:
    found = with_baselines(
        [*candidates(["hae", "fastv"], [0.1, 0.2]), Candidate("own", methods.get("snapkv", budget=9))]
    )
    assert labels(found) == ["full", "hae 0.1", "hae 0.2", "fastv", "own", "random 0.1", "random 0.2", "random 9"]
    assert labels(with_baselines(found)) == labels(found)
    own = [*candidates(["hae"], [0.1]), Candidate("floor", methods.get("random", budget=0.1, seed=5))]
    assert labels(with_baselines(own)) == ["full", "hae 0.1", "floor"]
    with pytest.raises(MethodError, match="label full"):
        with_baselines([Candidate("full", methods.get("hae"))])


def test_what_makes_no_plan() -> None:
    plan = fake_bench.plan(LOG)
    for change, words in (
        ({"items": 0}, "at least one item"),
        ({"tasks": ()}, "at least one task"),
        ({"tasks": ("fake-a", "fake-a")}, "duplicate task 'fake-a'"),
        ({"entries": plan.entries + plan.entries[:1]}, "duplicate label 'full'"),
    ):
        with pytest.raises(InputError, match=words):
            replace(plan, **change)


def test_conflicts_name_what_differs() -> None:
    plan = fake_bench.plan(LOG)
    assert plan.conflicts(plan) == []
    more = fake_bench.plan(LOG, count=5, budgets=(0.05, 0.1, 0.2))
    more = replace(more, tasks=("fake-c", *more.tasks))
    assert more.conflicts(plan) == []
    assert plan.conflicts(more) == [
        "items were 5 and are now 3",
        "missing tasks: fake-c",
        "missing methods: snapkv 0.05, hae 0.05, random 0.05",
    ]
    assert replace(plan, seed=1, model="demo").conflicts(plan) == [
        "model was 'log' and is now 'demo'", "seed was 0 and is now 1",
    ]  # fmt: skip
    other = tuple(Entry.of(Candidate(e.label, methods.get("snapkv", budget=0.1, window=8)))
                  if e.label == "snapkv 0.1" else e for e in plan.entries)  # fmt: skip
    assert replace(plan, entries=other).conflicts(plan) == ["'snapkv 0.1' had window='auto' and now has 8"]
    other = tuple(replace(e, method="h2o") if e.label == "snapkv 0.1" else e for e in plan.entries)
    assert replace(plan, entries=other).conflicts(plan) == ["'snapkv 0.1' was snapkv and is now h2o"]


def test_a_file_among_the_settings_may_not_change(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"

    def plan(scores: list[list[float]]) -> Plan:
        path.write_text(json.dumps({"scores": scores}))
        return Plan.of(["fake-a"], [Candidate("x", methods.get("sparsemm", head_scores=str(path)))], 1)

    old = plan([[1.0, 0.0]])
    assert plan([[1.0, 0.0]]).conflicts(old) == []
    assert plan([[0.0, 1.0]]).conflicts(old) == [
        "'x' depends on a file that has changed (its own file, or one that its settings name)"
    ]


def test_plans_without_the_field_time_every_tenth_item() -> None:
    plan = Plan.of(["cards-1"], candidates(["snapkv"], [0.1]), 2, time_every=0)
    assert Plan.from_dict(plan.to_dict()).time_every == 0
    data = plan.to_dict()
    del data["time_every"]
    assert Plan.from_dict(data).time_every == 10
    assert plan.conflicts(Plan.from_dict(data)) == []
