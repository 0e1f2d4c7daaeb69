"""Every option of every method refuses what it cannot be, in words that name it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from foveakv import methods
from foveakv.cli.settings import build_method
from foveakv.errors import FoveaKVError, MethodError
from foveakv.util.values import _choices, field_types

WHOLE = [2.5, math.nan, "many", True, [1], -1]
NUMBER = [math.nan, math.inf, "half", [0.5], -1]


def wrong_values(kind: Any) -> list[Any]:
    kinds = _choices(kind)
    if str in kinds:
        return []  # free text
    if bool in kinds:
        return ["perhaps", 2, 0.5]
    if float in kinds:
        return NUMBER
    return WHOLE if int in kinds else ["no such choice"]


CASES = [
    pytest.param(name, option, value, id=f"{name}-{option}-{value}")
    for name in methods.available()
    for option, kind in field_types(methods.find(name)).items()
    if option != "budget"  # has tests of its own
    for value in wrong_values(kind)
]


@pytest.mark.parametrize(("name", "option", "value"), CASES)
def test_wrong_values_are_refused(name: str, option: str, value: Any) -> None:
    with pytest.raises(FoveaKVError, match=option):
        methods.get(name, **{option: value})


def test_presets_go_by_name_and_options_change_them() -> None:
    method = build_method("hybridkv", "0.2", ["preset=small", "window=4"])
    assert (method.theta_quantile, method.chunk_size, method.window, method.budget) == (0.7, 4, 4, 0.2)
    with pytest.raises(MethodError, match="no preset 'huge'"):
        build_method("hae", None, ["preset=huge"])
    with pytest.raises(MethodError, match="streaming has no option 'preset'"):
        build_method("streaming", None, ["preset=small"])
    with pytest.raises(MethodError, match="streaming has no presets"):
        methods.get("streaming", preset="small")
