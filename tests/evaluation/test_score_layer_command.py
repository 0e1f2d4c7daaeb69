"""`foveakv tune --score-layer`: the curve, the file, and that HAE finds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_lines import error_of, given, invoke

from foveakv.evaluation.store import command_line
from foveakv.methods import calibration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return given(tmp_path_factory.mktemp("layers"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Calibration files go to a folder of the test."""
    monkeypatch.setenv("FOVEAKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_file_is_found_for_the_model(folder: Path, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "curve.json"
    args = ["tune", "--score-layer", "--model", str(folder / "model"), "--data", str(folder), "-n", "6"]
    done = invoke([*args, "--layers", "all", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert 'get("hae", score_layer="calibrated")' in done.stdout
    (file,) = cache.rglob("*.json")
    found, data = calibration.read(file), json.loads(out.read_text())
    assert found.layers == (data["chosen"],)
    assert [point["layer"] for point in found.curve] == [point["layer"] for point in data["layers"]]
    assert [point["layer"] for point in found.curve] == list(range(found.depth))
    assert (found.keep, found.model) == (0.15, str(folder / "model"))
    assert calibration.find(found.digest) == found
    assert data["file"] == str(file)


def test_another_file_and_share(folder: Path, cache: Path, tmp_path: Path) -> None:
    args = ["tune", "--score-layer", "--model", str(folder / "model"), "--data", str(folder), "-n", "6"]
    done = invoke([*args, "--layers", "1", "--keep", "0.5", "--out", str(tmp_path / "own.json")])
    assert done.exit_code == 0, done.output
    assert calibration.read(tmp_path / "own.json").keep == 0.5
    assert not cache.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--layers", "first"], "--layers is `all`, or numbers"),
        (["--keep", "1.5"], "target_visual_tokens"),
        (["--layers", "99"], "the layers to try are 0 to"),
    ],
)
def test_mistakes(folder: Path, args: list[str], message: str) -> None:
    command = ["tune", "--score-layer", "--model", str(folder / "model"), "--data", str(folder)]
    assert message in error_of(invoke([*command, *args]))


def test_the_command_in_the_file_names_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["/x/__main__.py", "tune", "--json", "a.json", "-n", "4", "--out=b", "-o", "c", "--search"]
    )
    assert command_line(without=("--out", "-o", "--json")) == "foveakv tune -n 4 --search"
    assert command_line() == "foveakv tune --json a.json -n 4 --out=b -o c --search"


def test_the_shipped_file_is_of_the_embedded_model() -> None:
    (file,) = calibration.SHIPPED.glob("*.json")
    found = calibration.read(file)
    assert (found.model, found.depth, found.keep) == ("demo", 30, 0.15)
    assert "@validation" in found.command
    assert calibration.find(found.digest) == found
    best = min(found.curve, key=lambda point: point["kl"])
    assert found.layers[0] <= best["layer"]
