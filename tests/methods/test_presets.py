"""Presets: the papers' constants, in every list that users see, and changed by further options."""

from __future__ import annotations

import dataclasses
from typing import Any

import matrix
import pytest

import foveakv
from foveakv import methods
from foveakv.cli.methods import presets_of
from foveakv.errors import MethodError

WITH_PAPER: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 32, "kernel": 5, "window_share": 1.0},
    "adakv": {"window": 32, "kernel": 7, "window_share": 1.0},
    "pyramidkv": {"window": 8, "kernel": 5, "window_share": 1.0},
    "mixkv": {"window": 32, "kernel": 5, "window_share": 1.0},
    "sparsemm": {"window": 32, "kernel": 5, "window_share": 1.0},
    "quest": {"page_size": 16, "full_layers": 2},
    "lookm": {"visual_share": 0.0},
    "hybridkv": {"theta": 0.9, "rho": 0.75, "chunk_size": 8},
}


@pytest.mark.parametrize("name", WITH_PAPER)
def test_the_papers_constants_are_a_preset(name: str) -> None:
    method = methods.get(name, preset="paper", budget=0.3, **matrix.NEEDED.get(name, {}))
    assert method.describe()["budget"] == 0.3
    for option, value in WITH_PAPER[name].items():
        assert getattr(method, option) == value


def test_no_preset_is_left_out() -> None:
    found = {name for name in methods.available() if "paper" in getattr(methods.find(name), "presets", {})}
    assert set(WITH_PAPER) <= found


@pytest.mark.parametrize("name", WITH_PAPER)
def test_presets_consist_of_options_and_are_listed(name: str) -> None:
    cls: Any = methods.find(name)
    options = {field.name for field in dataclasses.fields(cls)}
    lines = presets_of(cls)
    for preset, own in cls.presets.items():
        assert set(own) <= options
        assert any(line.startswith(f"preset={preset}: ") for line in lines)
        assert methods.get(name, preset=preset, **matrix.NEEDED.get(name, {})).name == name


def test_options_override_a_preset_and_unknown_ones_are_named() -> None:
    assert foveakv.SnapKV.preset("paper", window=9).window == 9
    with pytest.raises(MethodError, match="AdaKV has no preset 'large'; choose one of paper"):
        foveakv.AdaKV.preset("large")
    assert presets_of(foveakv.Full) == []
