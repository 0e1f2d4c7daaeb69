"""Run folders that were edited or damaged: one clear error that names file and line, or a report that holds."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic_results as synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from foveakv.cli import app
from foveakv.errors import FoveaKVError, InputError
from foveakv.evaluation import store
from foveakv.evaluation.report import markdown, page, tables
from foveakv.evaluation.report.content import Report
from foveakv.evaluation.report.files import read

MACHINE = {
    "cpu": "A Processor", "threads": 2, "accelerator": None, "versions": {"torch": "2.13.0", "python": "3.11.4"},
    "kernels": {"cpu": "ready"},
    "model": {"class": "Llava", "parameters": 158_000_000, "dtype": "float32", "device": "cpu", "attention": "sdpa"},
}  # fmt: skip
START = {"time": "2026-01-02T03:04:05+00:00", "workers": 1, "command": "foveakv eval run", "machines": [MACHINE]}
PLAN = synthetic.plan(2, (0.05, 0.5), ("hae", "hybridkv", "quest", "random"), ("needle", "turns"))
LINES = [result.to_dict() for result in synthetic.results(PLAN)]
FILES = (store.PLAN, store.RUN, "results/worker-0.jsonl")
CONTENT: dict[str, list[Any]] = {
    store.PLAN: [json.loads(json.dumps(PLAN.to_dict()))],
    store.RUN: [{"starts": [START, START]}],
    "results/worker-0.jsonl": json.loads(json.dumps(LINES)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "run"


def write(folder: Path, changed: str | None = None, data: bytes = b"") -> None:
    """A whole run, with other bytes in one file."""
    (folder / store.RESULTS).mkdir(parents=True, exist_ok=True)
    for name, values in CONTENT.items():
        (folder / name).write_bytes(data if name == changed else encode(values))


def encode(values: list[Any]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def edited(value: Any, path: tuple[Any, ...], how: str, new: Any) -> Any:
    """A copy in which the value at a path is replaced, removed, or gets a neighbour."""
    if not path:
        return new
    copied = copy.deepcopy(value)
    parent = copied
    for key in path[:-1]:
        parent = parent[key]
    if how == "remove":
        del parent[path[-1]]
    elif how == "add" and isinstance(parent, dict):
        parent["unknown"] = new
    else:
        parent[path[-1]] = new
    return copied


def outcome(folder: Path) -> Report | FoveaKVError:
    try:
        return read(folder)
    except FoveaKVError as error:
        return error


def check(folder: Path, name: str, *, whole: bool = False) -> None:
    """Either an error of one line with the name of the file, or a report whose figures are finite."""
    found = outcome(folder)
    if not isinstance(found, Report):
        assert "\n" not in str(found)
        assert name in str(found) or "has no results yet" in str(found)
        return
    json.dumps(tables.leaderboard_json(found.summary), allow_nan=False)
    for cell in found.summary.cells.values():
        assert cell.n == 0 or 0 <= cell.accuracy.mean <= 1
    if whole:
        page.render(found)
        markdown.render(found)


NUMBERS = [10**18, 10**30, -(10**400), 7.5, -1.0, 1e308, 5e-324]
TEXTS = ["", "0.1", "-5%", "512MiB", "a\nb", "\ud800", "NoVisualTokensError: x"]
VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(NUMBERS), st.floats()),
    *(st.sampled_from(TEXTS), st.text(max_size=4), st.lists(st.integers(0, 1), max_size=2)),
    st.sampled_from([[], {}, [[1, 0], [1]], {"x": [{}]}]),
)


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file with one edited value, and its content."""
    name = draw(st.sampled_from(FILES))
    values = CONTENT[name]
    line = draw(st.integers(0, len(values) - 1))
    path = draw(st.sampled_from(list(places(values[line]))))
    new = edited(values[line], path, draw(st.sampled_from(["replace", "remove", "add"])), draw(VALUES))
    return name, encode([*values[:line], new, *values[line + 1 :]])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits())
def test_an_edited_value(folder: Path, edit: tuple[str, bytes]) -> None:
    write(folder, *edit)
    check(folder, edit[0].rpartition("/")[2])


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits())
def test_an_edited_value_in_the_whole_report(folder: Path, edit: tuple[str, bytes]) -> None:
    pytest.importorskip("matplotlib")
    write(folder, *edit)
    check(folder, edit[0].rpartition("/")[2], whole=True)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FILES), st.data())
def test_edited_bytes(folder: Path, name: str, data: st.DataObject) -> None:
    content = encode(CONTENT[name])
    place = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(place, min(len(content), place + 5)))
    write(folder, name, content[:place] + data.draw(st.binary(max_size=3)) + content[end:])
    check(folder, name.rpartition("/")[2])


def first(**changes: Any) -> bytes:
    return encode([{**LINES[0], **changes}, *LINES[1:]])


def without(field: str) -> bytes:
    return encode([{key: value for key, value in LINES[0].items() if key != field}, *LINES[1:]])


WRONG = {
    "score of 7.5": (first(score=7.5), "score must be from 0 to 1, got 7.5"),
    "score as text": (first(score="good"), "score must be a number or null, got 'good'"),
    "no score": (first(score=None), "score is missing, and there is no error"),
    "NaN": (first(kl=float("nan")), "not JSON: it has the value NaN"),
    "infinity": (first(kl=1.0).replace(b'"kl": 1.0', b'"kl": 1e999'), "kl is too large a number"),
    "negative bytes": (first(stored_bytes=-1), "stored_bytes must be 0 or more, got -1"),
    "true for a number": (first(item=True), "item must be a whole number, got true"),
    "missing field": (without("label"), "the field 'label' is missing"),
    "unknown field": (first(scroe=1.0), "unknown field 'scroe'"),
    "wrong budget": (first(budget="much"), "budget: budget 'much' cannot be read"),
    "wrong turn": (first(turns=[{}]), r"the field 'turns[0].text' is missing"),
    "uneven map": (first(details={"static_heads": [[1, 0], [1]]}), "details.static_heads must have rows of equal"),
    "no object": (b"[1]\n" + encode(LINES[1:]), "the value must be an object, got a list"),
    "no JSON": (b"{nothing}\n" + encode(LINES[1:]), "not JSON: "),
    "Latin-1": (first(label="Zeiß").decode("unicode_escape").encode("latin-1"), "not UTF-8 text (byte "),
    "UTF-16": (encode(LINES).decode().encode("utf-16"), "not UTF-8 text (byte 0)"),
    "deep nesting": (b"[" * 200_000 + b"\n" + encode(LINES[1:]), "too deeply nested"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_is_named_with_exit_code_2(folder: Path, case: str) -> None:
    data, words = WRONG[case]
    write(folder, "results/worker-0.jsonl", data)
    with pytest.raises(InputError) as found:
        read(folder)
    assert str(found.value).startswith(f"{folder}/results/worker-0.jsonl, line 1: ")
    assert words in str(found.value)
    assert str(found.value).endswith("; delete the line to run its item again")
    done = CliRunner().invoke(app, ["eval", "report", str(folder)])
    assert done.exit_code == 2
    assert "worker-0.jsonl" in done.output.replace("\n", "")
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        (store.PLAN, b"\xff\xfe", "plan.json is damaged: not UTF-8 text (byte 0)"),
        (store.PLAN, b"[]", "plan.json is damaged: expected a JSON object, got a list"),
        (store.PLAN, json.dumps({**PLAN.to_dict(), "items": 0}).encode(), "plan.json: items must be 1 or more, got 0"),
        (store.PLAN, json.dumps({**PLAN.to_dict(), "format": 9}).encode(), "plan.json: the plan has format 9"),
        (store.RUN, b'{"starts": [{"machines": [1]}]}', "run.json: starts[0].machines[0] must be an object, got 1"),
        (store.RUN, b'{"starts": [{"time": 5}]}', "run.json: starts[0].time must be a text, got 5"),
        (store.RUN, b"{", "run.json is damaged: not JSON"),
    ],
)  # fmt: skip
def test_wrong_files_are_named(folder: Path, name: str, data: bytes, words: str) -> None:
    write(folder, name, data)
    with pytest.raises(InputError) as found:
        read(folder)
    assert words in str(found.value)
    assert str(found.value).count("\n") == 0


def test_a_file_with_a_byte_order_mark_is_read(folder: Path) -> None:
    write(folder, "results/worker-0.jsonl", "\ufeff".encode() + encode(LINES))
    assert isinstance(read(folder), Report)
