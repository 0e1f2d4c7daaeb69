"""Option checks: what passes, and that every error names the option, what it may be and what was given."""

import math

import pytest

from foveakv.engines.transformers.options import CacheOptions
from foveakv.errors import MethodError
from foveakv.methods import checks
from foveakv.methods.full import Full


@pytest.mark.parametrize("value", [2.5, 3.0, True, "4", None, -1, math.nan, [1]])
def test_whole_numbers(value):
    with pytest.raises(MethodError, match=r"h2o: recent must be a whole number, at least 0 \(newest tokens\); got "):
        checks.whole_number("h2o", "recent", value, 0, "newest tokens")
    checks.whole_number("h2o", "recent", 0, 0)
    checks.whole_number("h2o", "recent", 7, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "x", None, 1.5, -0.1])
def test_shares(value):
    with pytest.raises(MethodError, match=r"h2o: heavy must be a number between 0 and 1; got "):
        checks.share("h2o", "heavy", value)
    for good in (0, 1, 0.5):
        checks.share("h2o", "heavy", good)
    with pytest.raises(MethodError, match=r"in \(0, 1\]; got 0"):
        checks.share("h2o", "heavy", 0, above_zero=True)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({"least": 0}, "a number, at least 0"), ({"least": 0, "most": 2}, "between 0 and 2"), ({}, "a number; got")],
)
def test_numbers(limits, expected):
    for value in (math.nan, math.inf, -math.inf, False, "1"):
        with pytest.raises(MethodError, match=f"hae: r must be .*{expected}"):
            checks.number("hae", "r", value, **limits)
    checks.number("hae", "r", 1.5, **limits)


def test_choices_and_flags():
    with pytest.raises(MethodError, match=r"hae: mode must be one of 'mark' or 'rerank'; got 'flush'"):
        checks.choice("hae", "mode", "flush", ("mark", "rerank"))
    with pytest.raises(MethodError, match=r"hae: mode .*; got \['mark'\]"):
        checks.choice("hae", "mode", ["mark"], ("mark", "rerank"))
    with pytest.raises(MethodError, match=r"hae: dap must be True or False; got 1"):
        checks.flag("hae", "dap", 1)
    checks.choice("hae", "mode", "mark", ("mark", "rerank"))
    checks.flag("hae", "dap", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_decode_slots": 2.5}, r"cache options: max_decode_slots must be a whole number, at least 1 .*; got 2\.5"),
        ({"max_decode_slots": "9"}, r"max_decode_slots .*; got '9'"),
        ({"max_decode_slots": True}, r"max_decode_slots .*; got True"),
        ({"backend": ["blocks"]}, r"no attention backend \['blocks'\]"),
        ({"backend": None}, "no attention backend None"),
    ],
)
def test_options_of_a_cache(options, message):
    with pytest.raises(MethodError, match=message):
        CacheOptions(**options).check(Full())
    CacheOptions("auto", max_decode_slots=3).check(Full())
