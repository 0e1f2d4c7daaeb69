"""Calibration files: written, found by the model's digest, and refused where they are damaged."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from foveakv.errors import MethodError
from foveakv.methods import calibration
from foveakv.methods.calibration import ScoreLayers

FOUND = ScoreLayers(
    model="tiny", digest="0123456789abcdef" * 4, layers=(3, 5), depth=8, keep=0.15,
    curve=({"layer": 3, "kl": 0.1, "agreement": 0.9, "own_kept": None},), command="foveakv tune", versions="torch 2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEAKV_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "SHIPPED", tmp_path / "shipped")


def test_saved_files_are_found_by_the_digest(tmp_path: Path) -> None:
    assert calibration.find(FOUND.digest) is None
    path = calibration.save(FOUND)
    assert path.parent == tmp_path / "score-layers"
    assert calibration.find(FOUND.digest) == FOUND
    assert calibration.read(path) == FOUND
    assert calibration.find("f" * 64) is None
    assert calibration.source(FOUND) == str(path)


def test_the_users_file_comes_before_the_shipped_one(tmp_path: Path) -> None:
    calibration.save(replace(FOUND, layers=(1,)), tmp_path / "shipped" / "tiny.json")
    found = calibration.find(FOUND.digest)
    assert found is not None
    assert found.layers == (1,)
    assert "ships" in calibration.source(found)
    calibration.save(FOUND)
    assert calibration.find(FOUND.digest) == FOUND


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 3), ("digest", "abc"), ("digest", 5), ("layers", []), ("layers", [2, 1]), ("layers", [1.0]),
        ("layers", [8]), ("layers", 3), ("depth", 0), ("depth", True), ("keep", 0), ("keep", 1.5), ("keep", "0.1"),
        ("criterion", "best"), ("rows", None), ("curve", [{"kl": 0.1}]), ("curve", [{"layer": 0, "kl": "low"}]),
        ("curve", {}), ("command", None), ("versions", []),
    ],
)  # fmt: skip
def test_damaged_fields_are_named(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps({**asdict(FOUND), field: value}))
    with pytest.raises(MethodError, match=f"damaged.json.*'{field}'"):
        calibration.read(path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    with pytest.raises(MethodError, match=r"no calibration file .*damaged.json.*--score-layer"):
        calibration.read(path)
    for text in ('{"model": ', "\x00", "[]"):
        path.write_text(text)
        with pytest.raises(MethodError, match=r"damaged\.json"):
            calibration.read(path)
    values = asdict(FOUND)
    del values["keep"]
    path.write_text(json.dumps(values))
    with pytest.raises(MethodError, match="'keep' is missing"):
        calibration.read(path)


def test_a_users_file_of_another_model_is_refused() -> None:
    calibration.save(replace(FOUND, digest="f" * 64), calibration.user_file(FOUND.digest))
    with pytest.raises(MethodError, match="another model"):
        calibration.find(FOUND.digest)


def test_shipped_files_are_valid() -> None:
    for file in (Path(calibration.__file__).parent / "data" / "score_layers").glob("*.json"):
        assert calibration.read(file).curve


def test_rule_of_thumb_is_half_of_the_depth() -> None:
    assert [calibration.rule_of_thumb(depth) for depth in (1, 2, 30, 32)] == [0, 1, 15, 16]
