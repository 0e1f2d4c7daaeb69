"""The evaluation's report: page, Markdown, JSON and plots; and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import synthetic_results as synthetic

from foveakv.errors import InputError, MissingDependencyError, StoreError
from foveakv.evaluation import store
from foveakv.evaluation.report import markdown, page, plots, svg
from foveakv.evaluation.report.content import Report
from foveakv.evaluation.report.files import read, write
from foveakv.evaluation.report.labels import spread
from foveakv.evaluation.summary import Summary

pytest.importorskip("matplotlib")

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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write(small(6, synthetic.TASKS), folder)
    return folder


class Outline(HTMLParser):
    """Ids, tags and what is fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.attributes: list[str] = []
        self.data: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.attributes += values
        if values.get("id"):
            self.ids.append(str(values["id"]))
        self.links += [str(values[name]) for name in ("src", "href", "xlink:href") if values.get(name)]

    def handle_data(self, data: str) -> None:
        self.data.append(data)


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    return found


def test_files(written: Path) -> None:
    names = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
    assert {"report.html", "report.md", "leaderboard.json"} <= names
    assert {f"plots/accuracy-{task}.svg" for task in (*synthetic.TASKS, "mean", "bytes", "time")} <= names
    assert "plots/static-1.svg" in names
    json.loads((written / "leaderboard.json").read_text())


def test_page_is_one_file_with_unique_ids(written: Path) -> None:
    page = outline((written / "report.html").read_text())
    assert [link for link in page.links if not link.startswith(("#", "data:"))] == []
    assert len(page.ids) == len(set(page.ids))
    targets = {link[1:] for link in page.links if link.startswith("#")}
    assert targets <= set(page.ids)
    sections = ["tasks", "leaderboard", "budget", "cost", "differences", "figures", "static", "chunks", "failures"]
    assert [name for name in page.ids if name in sections] == sections


def test_page_says_what_was_run(written: Path) -> None:
    text = (written / "report.html").read_text()
    for expected in (
        "158 million parameters", "6 of each task", "5%, 50%", "A Processor, 2 threads", "torch 2.13.0",
        "foveakv eval run --items 4", "2026-01-02T03:04:05",
    ):  # fmt: skip
        assert expected in text, expected


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


def test_everything_on_the_page_is_escaped() -> None:
    text = page.render(hostile_report())
    found = outline(text)
    assert found.tags.count("script") == 1
    assert not {"img", "blink", "b", "iframe"} & set(found.tags)
    assert not [name for name in found.attributes if name.startswith("on")]
    assert text.count("{{ 7 * 7 }}") > 10
    shown = "".join(found.data)
    for place in ("run", "task", "label", "error", "model", "cpu", "accelerator", "torch", "class", "dtype", "time",
                  "command", "title", "later", "name"):  # fmt: skip
        assert hostile(place).rpartition("/")[2] in shown, place  # a model's name is shown without its folders


def test_everything_in_the_markdown_is_escaped() -> None:
    text = markdown.render(hostile_report())
    assert not re.search(r"(?<!\\)<(script|blink|img)", text)
    assert not re.search(r"(?<!\\)`code", text)
    small_text = markdown.render(small(label=EVIL, error=EVIL))
    assert "\\| $5" in small_text


def test_plots_of_hostile_names_are_well_formed() -> None:
    for plot in hostile_report().plots:
        ET.fromstring(plot.file())
        assert re.fullmatch(r"[a-z0-9-]+", plot.name)


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


# A frame of the width asked for, since a window has a least width of its own; what it finds goes to the frame's page.
PROBE = """<!doctype html><title>probe</title>
<iframe id="page" src="report.html" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="found"></pre><script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const page = frame.contentDocument;
  page.querySelectorAll("details").forEach((fold) => fold.open = true);
  const overlapping = [...page.querySelectorAll("figure svg")].flatMap((svg) => {{
    const boxes = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) =>
      Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.35 * a.height).map(() => svg.parentNode.id));
  }});
  const buttons = page.querySelectorAll(".legend button");
  buttons[1].click();
  document.getElementById("found").textContent = JSON.stringify({{
    overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    width: page.documentElement.clientWidth,
    sections: [...page.querySelectorAll("section")].map((section) => section.id),
    tables: page.querySelectorAll("table").length,
    figures: [...page.querySelectorAll("figure svg")].filter((svg) => svg.getBoundingClientRect().height > 40).length,
    overlapping: [...new Set(overlapping)],
    picked: page.body.classList.contains("focus") && page.querySelectorAll("figure .series.on").length > 0,
  }});
}};
</script>"""


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.mark.browser
@pytest.mark.skipif(
    browser() is None, reason="no Chromium or Chrome on this machine (Debian: apt-get install chromium)"
)
@pytest.mark.parametrize("width", [1280, 390])
def test_page_in_a_browser(written: Path, tmp_path: Path, width: int) -> None:
    probe = written / f"probe-{width}.html"
    probe.write_text(PROBE.format(width=width))
    command = [
        str(browser()), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000",
        "--virtual-time-budget=10000", "--dump-dom", probe.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    found = re.search(r'<pre id="found">(\{.*?\})</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    data = json.loads(found[1])
    assert ":CONSOLE" not in done.stderr, done.stderr[-2000:]
    assert data["width"] in range(width - 20, width + 1)
    assert data["overflow"] <= 0
    assert data["sections"][:4] == ["tasks", "leaderboard", "budget", "cost"]
    assert data["tables"] > 20
    assert data["figures"] >= len(synthetic.TASKS) + 3
    assert data["overlapping"] == []
    assert data["picked"]
