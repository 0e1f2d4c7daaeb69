"""`foveakv analyze` and `foveakv show` end to end, with a tiny model in a folder; `demo` uses the embedded model."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_folder
from PIL import Image
from typer.testing import CliRunner, Result

from foveakv.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def given(folder: Path, tmp_path: Path) -> list[Any]:
    files = tiny_folder.pictures(tmp_path, 2)
    return ["--model", folder, "--image", files[0], "--image", files[1]]


def invoke(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def succeed(*args: Any) -> str:
    result = invoke(*args)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return " ".join(result.stdout.split())


def fail(*args: Any) -> str:
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def check_picture(path: Path, width: int) -> None:
    with Image.open(path) as image:
        assert image.width > width
        assert len(image.convert("L").getcolors(256) or []) > 20  # something is drawn


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf8", newline="") as lines:
        return list(csv.DictReader(lines))


def outputs(folder: Path) -> tuple[list[Any], Path, Path, Path]:
    pytest.importorskip("matplotlib")
    paths = folder / "o" / "out.json", folder / "o" / "out.csv", folder / "o" / "out.png"
    return ["--json", paths[0], "--csv", paths[1], "--plot", paths[2]], *paths


def test_heads(given: list[Any], tmp_path: Path) -> None:
    options, out, table, plot = outputs(tmp_path)
    text = succeed(
        "analyze", "heads", *given, "--prompt", "What differs?", "--prompt", "Costs $1, or $2?", "--set", "theta=0.5",
        "--set", "window=4", "--set", "budget=0.5", *options,
    )  # fmt: skip
    assert "4 layers x 2 KV heads; S: attention of the top 5%; static from 0.5" in text
    assert "of the heads have one type for all prompts" in text
    data = json.loads(out.read_text())
    assert [prompt["label"] for prompt in data["prompts"]] == ["What differs?", "Costs $1, or $2?"]
    assert len(data["pairs"]) == 1
    assert data["settings"]["theta"] == 0.5
    assert data["environment"]["versions"]["torch"]
    found = rows(table)
    assert len(found) == 2 * 4 * 2
    assert float(found[-1]["top_k_attention"]) == data["prompts"][1]["scores"][3][1]
    check_picture(plot, 900)


def test_heads_while_decoding(given: list[Any], tmp_path: Path) -> None:
    options, out, table, plot = outputs(tmp_path)
    text = succeed(
        "analyze", "heads", *given, "--prompt", "What differs?", "--set", "theta=0.5", "--set", "window=4", "--decode",
        "--ignore-eos", "-n", 7, "--sweep", *options,
    )  # fmt: skip
    assert "rank correlation with S, means over prompts: focus count" in text
    assert "rho 0.75" in text
    data = json.loads(out.read_text())
    assert data["focus"]["steps"] == [6]
    assert len(data["focus"]["counts"][0]) == 6
    assert data["sweep"][0]["theta"] == 0.5
    assert "focus_count" in rows(table)[0]
    check_picture(plot, 900)


def test_sparsity(given: list[Any], tmp_path: Path) -> None:
    options, out, table, plot = outputs(tmp_path)
    args = ("analyze", "sparsity", *given, "--prompt", "What differs?", "--prompt", "What is it?")
    text = succeed(*args, "--set", "target_visual_tokens=0.5", *options)
    assert "16 of 32" in text
    assert "The paper's 90% is that of Phi-3.5-Vision (90.43%)" in text
    data = json.loads(out.read_text())
    assert data["prompts"][0]["overlap"][0] == 1
    assert data["mean_chance"] == data["mean_rule_chance"] == 0.5
    assert len(data["deciding"]["mean"]["best"]) == 4
    assert "share of all pairs (the paper's)" in succeed(*args, "--per", "all", "--share", "0.3")
    assert len(rows(table)) == 2 * 4
    check_picture(plot, 900)
    assert "the first layer evicts nothing" in succeed(*args, "--set", "r=0", "--csv", table, "--plot", plot)
    assert rows(table)[0]["overlap"] == ""
    check_picture(plot, 900)


def test_eviction(given: list[Any], tmp_path: Path) -> None:
    options, out, table, plot = outputs(tmp_path)
    text = succeed(
        "analyze", "eviction", *given, "--prompt", "What differs?", "--bins", "2,4,99", "-n", 11, *options,
    )  # fmt: skip
    assert "10 decode steps" in text
    assert "D = 99: never full in this number of steps" in text
    data = json.loads(out.read_text())
    assert [(r["size"], r["matched"]) for r in data["results"][:2]] == [(2, "steady size"), (2, "peak")]
    assert data["settings"]["bins"] == [2, 4, 99]
    assert len(rows(table)) == 4 * 4
    check_picture(plot, 900)


def test_show(given: list[Any], tmp_path: Path) -> None:
    options, out, table, picture = outputs(tmp_path)
    film = tmp_path / "o" / "film.png"
    text = succeed(
        "show", *given, "--prompt", "What differs?", "--method", "hybridkv", "--budget", "0.6",
        "--set", "classify=all_dynamic", "--set", "min_budget=1", "--layer", 1, "--layer", 3, "--head", 0, "-n", 4,
        "--ignore-eos", *options[:4], "--out", picture, "--filmstrip", film, "--frames", 2,
    )  # fmt: skip
    assert "layer 3, head 0" in text
    data = json.loads(out.read_text())
    assert [row["label"] for row in data["rows"]] == ["layer 1, head 0", "layer 3, head 0"]
    assert [len(image) for image in data["rows"][0]["images"]] == [16, 16]
    assert [step["label"] for step in data["steps"]] == ["step 1", "step 2", "step 3"]
    assert data["images"] == ["picture0.png", "picture1.png"]
    assert len(rows(table)) == (2 + 3) * 32
    check_picture(picture, 400)
    check_picture(film, 400)


def test_show_prints_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    from foveakv.cli.prompts import Task
    from foveakv.cli.show import _print

    _print(SimpleNamespace(rows=()), [], "an\x1b[2Jswer", Task("t", "?", [], [], "?"))
    assert "answer  an[2Jswer" in capsys.readouterr().out


def test_show_every_layer_and_the_mean(given: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    args = ("show", *given, "-p", "What differs?", "--method", "snapkv", "--set", "window=4", "-n", 1, "--json")
    succeed(*args, tmp_path / "a.json", "--out", tmp_path / "a.png")
    succeed(*args, tmp_path / "b.json", "--out", tmp_path / "b.png", "--each-layer")
    mean, each = (json.loads((tmp_path / name).read_text())["rows"] for name in ("a.json", "b.json"))
    assert [row["label"] for row in each] == [f"layer {i}" for i in range(4)]
    average = sum(row["images"][0][5] for row in each) / 4
    assert mean[0]["images"][0][5] == pytest.approx(average, abs=1e-5)


@pytest.mark.parametrize(("args", "message"), [
    (("analyze", "heads"), "give either --prompt (with --image) or --sample N"),
    (("analyze", "heads", "-p", "x", "--sample", 2), "give either --prompt"),
    (("analyze", "heads", "--sample", 2, "-m", "other"), "--sample is a prompt of the embedded model"),
    (("analyze", "heads", "-p", "x", "--ask", 0), "belong to sample prompts"),
    (("analyze", "heads", "--sample", 2, "--ask", 2), "ask is the index of a card, 0 to 1"),
    (("analyze", "heads", "--sample", 2, "--sample-kind", "song"), "no sample cards of kind 'song'"),
    (("analyze", "heads", "-p", "x", "--set", "tehta=1"), "did you mean 'theta'"),
    (("analyze", "heads", "-p", "x", "--plot", "plot.doc"), "the name of a plot ends in"),
    (("analyze", "sparsity", "-p", "x", "--set", "ddes=0", "--set", "dap=0"), "leaves nothing to do"),
    (("analyze", "sparsity", "-p", "x", "--per", "row"), "per"),
    (("analyze", "sparsity", "-p", "x", "--share", "0"), "share"),
    (("analyze", "sparsity", "-p", "x", "--set", "dap=0"), "leave dap=False out"),
    (("analyze", "heads", "-p", "x", "--sweep", "--set", "budget=1MB"), "share of the prompt or in tokens"),
    (("analyze", "eviction", "-p", "x", "--bins", "2,b"), "expected whole numbers"),
    (("analyze", "eviction", "-p", "x", "--bins", "1,2"), "1 is greedy eviction"),
    (("analyze", "eviction", "-p", "x", "--budget", "1.5"), "1.5 is over 100%"),
    (("analyze", "eviction", "-p", "x", "--budget", "3MB"), "not bytes"),
    (("show", "-p", "x"), "there is no output file"),
    (("show", "-p", "x", "--out", "o.png"), "no image to show"),
    (("show", "--sample", 2, "--out", "o.png", "--method", "nope"), "unknown method 'nope'"),
])  # fmt: skip
def test_mistakes_are_found_before_the_model_is_loaded(
    args: tuple[Any, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from foveakv import models

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    assert message in fail(*args)


@pytest.mark.demo
def test_analyses_of_the_embedded_model(tmp_path: Path) -> None:
    """The scores of its heads are much the same for two questions; its first layer attends evenly."""
    out = tmp_path / "out.json"
    succeed("analyze", "heads", "--sample", 2, "--ask", 0, "--ask", 1, "--json", out)
    data = json.loads(out.read_text())
    assert [prompt["label"] for prompt in data["prompts"]] == ["2 digits, card 1", "2 digits, card 2"]
    assert data["pairs"][0]["correlation"] > 0.9
    succeed("analyze", "sparsity", "--sample", 2, "--set", "target_visual_tokens=0.33", "--json", out)
    data = json.loads(out.read_text())
    assert data["prompts"][0]["evicted"] == 128 - 42
    assert len(data["prompts"][0]["overlap"]) == 30


@pytest.mark.parametrize("command", [("analyze", "heads"), ("analyze", "sparsity"), ("analyze", "eviction"), ("show",)])
def test_options_are_documented(command: tuple[str, ...]) -> None:
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    text = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    options = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help", "--no-trust-remote-code"}
    assert [option for option in sorted(options) if option not in page] == []
