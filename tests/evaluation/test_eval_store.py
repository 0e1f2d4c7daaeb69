"""A run's folder: what is on the disk counts, what was cut short does not, and nobody else's plan gets in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fake_bench
import pytest

from foveakv.errors import InputError, StoreError
from foveakv.evaluation.results import Result, TurnResult
from foveakv.evaluation.store import Store, read_plan, read_results

PLAN = fake_bench.plan(Path("log"))


def result(number: int, label: str = "full", error: str | None = None, reply: str = "é\n\u2028\udc80") -> Result:
    turns = (TurnResult("What?", reply, "7", 0.5, 1, 3),)
    return Result("fake-a", number, 0, label, None, label, {"method": label}, 0.5, turns, error=error)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store(tmp_path / "run", PLAN) as store:
        for number in range(3):
            store.add(result(number), "worker-0")
    return tmp_path / "run"


def lines(folder: Path) -> Path:
    return folder / "results" / "worker-0.jsonl"


def test_results_come_back(folder: Path) -> None:
    assert read_results(folder) == [result(number) for number in range(3)]
    assert read_plan(folder) == PLAN
    with Store(folder, PLAN) as store:
        assert store.done == dict.fromkeys((result(number).key for number in range(3)), None)
    with pytest.raises(InputError, match="not the folder of a run"):
        read_plan(folder / "results")


def test_lines_of_other_versions(folder: Path) -> None:
    """Fields that this version does not know may change what a result means: one clear error names them."""
    newer = result(3).to_dict()
    newer["turns"][0]["later"] = 1
    with lines(folder).open("a") as file:
        file.write(json.dumps(newer) + "\n")
    with pytest.raises(InputError, match=r"worker-0\.jsonl, line 4: unknown field 'turns\[0\]\.later'"):
        read_results(folder)


@pytest.mark.parametrize("cut", [1, 20, "text", "half"])
def test_a_torn_last_line_is_cut_off(folder: Path, cut: int | str) -> None:
    whole = lines(folder).read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    if isinstance(cut, int):
        torn, kept = whole[:-cut], 2  # also: a line without its end
    elif cut == "text":
        torn, kept = whole + b'{"task": "fa', 3
    else:
        torn, kept = whole + last[:30] + b"\x00\x00\n", 3
    lines(folder).write_bytes(torn)
    assert len(read_results(folder)) == kept
    assert lines(folder).read_bytes() == torn  # reading changes nothing
    with Store(folder, PLAN) as store:
        assert len(store.done) == kept
        store.add(result(5), "worker-0")
    assert [each.item for each in read_results(folder)] == [*range(kept), 5]


def test_a_damaged_line_in_the_middle_is_an_error(folder: Path) -> None:
    first, *rest = lines(folder).read_bytes().splitlines(keepends=True)
    lines(folder).write_bytes(first[:20] + b"\n" + b"".join(rest))
    with pytest.raises(InputError, match=r"worker-0\.jsonl, line 1: not JSON: .*; delete the line"):
        read_results(folder)


def test_a_result_wins_over_an_error_and_later_over_earlier(folder: Path) -> None:
    with Store(folder, PLAN) as store:
        store.add(result(7, error="first"), "worker-0")
        store.add(result(7, error="second"), "worker-1")
        store.add(result(0, error="not again"), "worker-1")
        assert store.done[result(7).key] == "second"
        store.add(result(8, error="was wrong"), "worker-1")
        store.add(result(8), "worker-0")  # in a file that is read before the other
    found = {each.item: each.error for each in read_results(folder)}
    assert found == {0: None, 1: None, 2: None, 7: "second", 8: None}


def test_another_plan_is_refused_and_changes_nothing(folder: Path) -> None:
    before = (folder / "plan.json").read_text()
    with pytest.raises(InputError, match="seed was 0 and is now 4; items were 3 and are now 1"):
        Store(folder, replace(PLAN, seed=4, items=1)).__enter__()
    assert (folder / "plan.json").read_text() == before
    more = replace(PLAN, items=9)
    with Store(folder, more):
        pass
    assert read_plan(folder) == more


def test_only_results_bind_a_plan(tmp_path: Path) -> None:
    with Store(tmp_path / "run", replace(PLAN, model="typo", items=40)):
        pass
    with Store(tmp_path / "run", PLAN) as store:
        store.add(result(1), "worker-0")
    with Store(tmp_path / "run", replace(PLAN, items=2)) as store:
        assert list(store.done) == [result(1).key]
    with pytest.raises(InputError, match="items were 2 and are now 1"):
        Store(tmp_path / "run", replace(PLAN, items=1)).__enter__()


def test_what_json_cannot_hold_is_an_error_of_its_result(folder: Path) -> None:
    with Store(folder, PLAN) as store:
        store.add(replace(result(6), kl=float("nan")), "worker-0")
        store.add(replace(result(7), details={"x": object()}), "worker-0")
    errors = {each.item: each.error or "" for each in read_results(folder)}
    assert "cannot be written as JSON: ValueError" in errors[6]
    assert "cannot be written as JSON: TypeError" in errors[7]


def test_one_process_at_a_time(folder: Path) -> None:
    with Store(folder, PLAN), pytest.raises(InputError, match="another process uses"):
        Store(folder, PLAN).__enter__()
    with Store(folder, PLAN):
        pass


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create the folder"):
        Store(tmp_path / "file", PLAN).__enter__()
    (tmp_path / "run" / "results").mkdir(parents=True)
    (tmp_path / "run" / "results" / "worker-0.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"has results but no plan\.json"):
        Store(tmp_path / "run", PLAN).__enter__()


def damage(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "plan.json").write_text(text)


@pytest.mark.parametrize(("how", "words"), [
    (damage("{"), "is damaged: not JSON"), (damage("[]"), "is damaged: expected a JSON object, got a list"),
    (damage('{"format": 2}'), "the field 'tasks' is missing"),
    (damage('{"format": 1}'), "plan.json: the plan has format 1; .*its scores count the first item of a list"),
])  # fmt: skip
def test_damaged_plans_are_named(folder: Path, how: Callable[[Path], object], words: str) -> None:
    how(folder)
    with pytest.raises(InputError, match=words):
        Store(folder, PLAN).__enter__()
    # and the lock is free again
    (folder / "plan.json").write_text(json.dumps(PLAN.to_dict()))
    with Store(folder, PLAN):
        pass


def test_a_full_disk_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with Store(folder, PLAN) as store:
        monkeypatch.setattr("foveakv.evaluation.store.os.fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            store.add(result(5), "worker-0")
        assert result(5).key not in store.done


def test_starts_and_machines_are_noted(folder: Path) -> None:
    with Store(folder, PLAN) as store:
        store.add_start(2)
        store.add_machine({"cpu": "a"})
        store.add_machine({"cpu": "a"})
        store.add_machine({"cpu": "b"})
        store.add_start(1)
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [(each["workers"], each["machines"]) for each in starts] == [(2, [{"cpu": "a"}, {"cpu": "b"}]), (1, [])]
    assert starts[0]["time"].endswith("+00:00")
