"""The report's page: one file, every text escaped, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
import synthetic_results as synthetic
from synthetic_reports import EVIL, hostile, hostile_report, small

from foveakv.evaluation.report import markdown, page
from foveakv.evaluation.report.files import write

pytest.importorskip("matplotlib")


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
