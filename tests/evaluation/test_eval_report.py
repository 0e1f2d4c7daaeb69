"""The evaluation's report: page, Markdown, JSON and plots; and the page in a real browser."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_results as synthetic
from synthetic_reports import START, small

from foveakv.errors import InputError, MissingDependencyError, StoreError
from foveakv.evaluation import store
from foveakv.evaluation.report import markdown, page, plots, svg
from foveakv.evaluation.report.content import Report
from foveakv.evaluation.report.files import read, write
from foveakv.evaluation.report.labels import spread
from foveakv.evaluation.summary import Summary

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write(small(6, synthetic.TASKS), folder)
    return folder


def test_files(written: Path) -> None:
    names = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
    assert {"report.html", "report.md", "leaderboard.json"} <= names
    assert {f"plots/accuracy-{task}.svg" for task in (*synthetic.TASKS, "mean", "bytes", "time")} <= names
    assert "plots/static-1.svg" in names
    json.loads((written / "leaderboard.json").read_text())


def test_plots_are_well_formed_and_hold_no_stand_ins(written: Path) -> None:
    for path in (written / "plots").glob("*.svg"):
        text = path.read_text()
        ET.fromstring(text)
        assert "#010203" not in text
        assert "#c0c1c2" not in text
        assert "<metadata>" not in text or "<dc:date>" not in text
    assert "#010203" not in (written / "report.html").read_text()


def test_weak_and_blind_tasks_are_named(written: Path) -> None:
    for name in ("report.html", "report.md"):
        text = (written / name).read_text()
        assert "Task hard: full accuracy is under 85%: not used to rank." in text
        assert "Task blind: cannot tell the full cache from random: says nothing about methods" in text


def test_incomplete_runs_say_so() -> None:
    report = small(6)
    assert report.warnings[0].startswith("This run is incomplete")
    assert any("ended with an error" in line for line in report.warnings)
    plan = replace(report.summary.plan, entries=report.summary.plan.entries[:3])
    whole = [result for result in report.summary.results if result.label in [e.label for e in plan.entries]]
    assert not any("incomplete" in line for line in Report("whole", Summary(plan, whole)).warnings)


def test_markdown_tables_are_even(written: Path) -> None:
    block: list[int] = []
    for line in [*(written / "report.md").read_text().splitlines(), ""]:
        if line.startswith("|"):
            block.append(len(re.findall(r"(?<!\\)\|", line)))
        elif block:
            assert len(set(block)) == 1
            block = []


def test_markdown_links_are_files(written: Path) -> None:
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (written / "report.md").read_text())
    assert links
    assert all((written / link).is_file() for link in links)


def test_the_same_results_give_the_same_files() -> None:
    assert page.render(small()) == page.render(small())


def test_nothing_but_the_full_cache() -> None:
    """No budget, no floor, one item: a page all the same."""
    plan = synthetic.plan(1, methods=(), tasks=("needle",))
    text = page.render(Report("full", Summary(plan, synthetic.results(plan)), []))
    assert "random was not run here" in text
    assert "not recorded" in text


def test_a_run_that_has_only_begun() -> None:
    """Some candidates of the first task: no plot without a line, and the rest says what is missing."""
    report = small(2)
    begun = [r for r in report.summary.results if r.item == 0 and r.task == "needle"][:4]
    begun = [replace(result, score=0.5) for result in begun]  # too little to rank
    found = Report("begun", Summary(report.summary.plan, begun))
    names = [plot.name for plot in found.plots]
    assert "accuracy-needle" in names
    assert "accuracy-turns" not in names
    assert "accuracy-bytes" not in names
    text = page.render(found)
    assert "Task turns: the full cache has no result here" in text
    assert 'id="cost"' not in text
    markdown.render(found)


def test_budgets_of_several_kinds_and_none_under_one_name() -> None:
    """A series in which only some members have a budget of a panel's kind."""
    plan = synthetic.plan(2)
    lines = [line for line in plan.entries if line.method == "full"]
    for label, budget in (("x", None), ("x 0.1", 0.1), ("x 64", 64)):
        lines.append(replace(plan.entries[1], label=label, method="snapkv", settings={"budget": budget}))
    plan = replace(plan, entries=tuple(lines))
    found = Report("kinds", Summary(plan, synthetic.results(plan)))
    assert {"accuracy-needle", "accuracy-tokens-needle"} <= {plot.name for plot in found.plots}


def test_names_of_files_are_all_different() -> None:
    assert list(plots._slugs(["a b", "a-b", "mean", "???"]).values()) == ["a-b", "a-b-2", "mean-2", "task"]


def test_plots_of_an_earlier_report_go(tmp_path: Path) -> None:
    write(small(), tmp_path)
    old, own = tmp_path / "plots" / "accuracy-gone.svg", tmp_path / "plots" / "mine.svg"
    old.write_text("")
    own.write_text("")
    write(small(), tmp_path)
    assert own.exists()
    assert not old.exists()


def test_no_full_cache() -> None:
    report = small()
    rest = [result for result in report.summary.results if result.method != "full"]
    plan = replace(report.summary.plan, entries=report.summary.plan.entries[1:])
    found = Report("no full", Summary(plan, rest))
    assert any(line.startswith("The full cache was not run") for line in found.warnings)
    assert "No task can rank methods" in page.render(found)


def test_files_are_written_whole_whatever_the_text_is(tmp_path: Path) -> None:
    """Half a surrogate pair, as names of files and texts of models may have, is no UTF-8."""
    paths = write(small(error="E: \ud800"), tmp_path)
    assert r"E: \ud800" in paths[0].read_text()
    assert not list(tmp_path.rglob(".*"))


def test_read_from_a_folder(tmp_path: Path) -> None:
    report = small()
    with pytest.raises(InputError, match=r"no plan\.json"):
        read(tmp_path)
    (tmp_path / store.PLAN).write_text(json.dumps(report.summary.plan.to_dict()))
    with pytest.raises(InputError, match="has no results yet"):
        read(tmp_path)
    (tmp_path / store.RESULTS).mkdir()
    lines = [json.dumps(result.to_dict()) + "\n" for result in report.summary.results]
    (tmp_path / store.RESULTS / "0.jsonl").write_text("".join(lines[::2]))
    (tmp_path / store.RESULTS / "1.jsonl").write_text("".join(lines[1::2]))
    (tmp_path / store.RUN).write_text(json.dumps({"starts": [START]}))
    found = read(tmp_path)
    assert found.name == tmp_path.name
    assert found.summary.cells == report.summary.cells
    (tmp_path / store.RUN).write_text("{")
    with pytest.raises(InputError, match="damaged"):
        read(tmp_path)


def test_command(tmp_path: Path) -> None:
    import typer
    from typer.testing import CliRunner

    from foveakv.cli.eval.report import report as command

    app = typer.Typer()
    app.command()(command)
    report = small(2)
    run = tmp_path / "run"
    (run / store.RESULTS).mkdir(parents=True)
    (run / store.PLAN).write_text(json.dumps(report.summary.plan.to_dict()))
    (run / store.RESULTS / "0.jsonl").write_text(
        "".join(json.dumps(result.to_dict()) + "\n" for result in report.summary.results)
    )
    done = CliRunner().invoke(app, [str(run)])
    assert done.exit_code == 0, done.output
    assert (run / "report" / "report.html").is_file()
    failed = CliRunner().invoke(app, [str(tmp_path / "nowhere")])
    assert failed.exit_code == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write the report"):
        write(small(2), tmp_path / "file")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'foveakv\[demo\]'"):
        page.render(small(2))


def test_looks_are_all_different() -> None:
    names = ["full", *map(str, range(22)), "random"]
    found = svg.looks(names, {name: name for name in names})
    assert len({(look.colour, str(look.dash), look.marker) for look in found.values()}) == len(names)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([50, 10], [50, 10]),  # far enough apart
        ([50, 50], [45, 55]),  # pushed apart evenly
        ([0, 2, 4], [0, 10, 20]),  # not below the floor
        ([100, 99], [100, 90]),  # nor above the top
        ([50, 50, 62], [44, 54, 64]),  # a push that meets a third
    ],
)
def test_names_are_spread(wanted: list[float], expected: list[float]) -> None:
    assert spread(wanted, 10, 0, 100) == pytest.approx(expected)
