"""Project files agree with the code: versions, the documentation site's navigation, CONTRIBUTING's paths."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import foveakv
from foveakv import methods

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_supported_floors_are_the_versions_that_are_tested(package: str) -> None:
    stated = next(line for line in PROJECT["project"]["dependencies"] if re.match(rf"{package}\b", line))
    tested = re.search(rf"^{package}==([\d.]+)$", (ROOT / "constraints/lowest.txt").read_text(), re.M)
    floor = re.search(r">=([\d.]+)", stated)
    assert tested is not None
    assert floor is not None
    assert tested[1].split(".")[: floor[1].count(".") + 1] == floor[1].split(".")
    assert f"{package} {floor[1]}" in (ROOT / "README.md").read_text(encoding="utf8")


def test_the_version_is_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "foveakv.__version__"}
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf8"))
    assert f"## [{foveakv.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf8")


def test_citation_names_both_papers() -> None:
    papers = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf8"))["references"]
    assert {paper["url"].rsplit("/", 1)[1] for paper in papers} == {"2602.02197", "2604.05887"}


def _pages(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            if isinstance(value, list):
                yield from _pages(value)
            else:
                yield value


def test_the_site_has_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf8"))["nav"]
    assert sorted(_pages(nav)) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_every_method_is_in_the_table_of_methods() -> None:
    table = (ROOT / "docs/methods/index.md").read_text(encoding="utf8")
    names = re.findall(r"^\| (?:\[`(\w+)`\]\(\1\.md\)|`(full)`) \|", table, re.M)
    assert sorted(linked or full for linked, full in names) == methods.available()


@pytest.mark.parametrize("name", [name for name in methods.available() if name != "full"])
def test_every_option_of_a_method_is_in_its_page(name: str) -> None:
    page = (ROOT / "docs/methods" / f"{name}.md").read_text(encoding="utf8")
    assert re.findall(r"^## (.*)$", page, re.M)[:2] == ["What it does", "When to use it"]
    assert re.findall(r"^## (.*)$", page, re.M)[-2:] == ["Limits", "Source"]
    options = page.split("\n## Options\n")[1].split("\n## ")[0]
    fields = [field.name for field in dataclasses.fields(methods.find(name)) if field.init]
    assert [field for field in fields if not re.search(rf"^\| [^|]*`{field}`", options, re.M)] == []


def test_every_method_is_on_its_api_page() -> None:
    page = (ROOT / "docs/api/methods.md").read_text(encoding="utf8")
    listed = set(re.findall(r"^::: (foveakv\.methods\.\w+\.\w+)$", page, re.M))  # where mkdocstrings finds the source
    assert listed == {f"{module}.{name}" for name, module in methods.class_names().items()}


def test_the_interface_of_methods_is_on_the_api_pages() -> None:
    pages = "".join(page.read_text(encoding="utf8") for page in (ROOT / "docs/api").glob("*.md"))
    listed = set(re.findall(r"^::: [\w.]+\.(\w+)$", pages, re.M))
    elsewhere = {"__version__", "FoveaKVError", "class_names", "near"}  # the page of errors; helpers of the CLI
    assert sorted({*methods.__all__, *foveakv.__all__} - listed - elsewhere) == []


def test_methods_that_support_assisted_decoding_are_listed() -> None:
    page = (ROOT / "docs/supported-models.md").read_text(encoding="utf8")
    stated = re.search(r"do not evict while decoding: (.*?), and hae with `ddes=False`", page, re.S)
    assert stated is not None
    needed = {"sparsemm": {"head_scores": [[0.5]]}}
    made = [methods.get(name, **needed.get(name, {})) for name in methods.available()]
    assert sorted(stated[1].replace("\n", " ").split(", ")) == [m.name for m in made if not m.evicts_while_decoding]


def test_paths_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf8")
    paths = set(re.findall(r"`((?:src|tests|docs|benchmarks|constraints|training|examples|\.ci)/[\w./-]+)`", text))
    assert len(paths) > 15
    assert [path for path in sorted(paths) if "NAME" not in path and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf8")
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(encoding="utf8"), re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_forms_are_complete(form: Path) -> None:
    content = yaml.safe_load(form.read_text(encoding="utf8"))
    assert content["name"]
    assert content["description"]
    for part in content["body"]:
        assert part["attributes"]["label"]
        assert part["type"] == "checkboxes" or part["id"]
