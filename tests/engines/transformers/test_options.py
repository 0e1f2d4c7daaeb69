"""`CacheOptions`: one set of options, validated in one place, taken by `compress` and `cache_for` in two forms."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import families
import matrix
import pytest

import foveakv
from foveakv import CacheOptions, errors

MAKERS = pytest.mark.parametrize("make", [foveakv.compress, foveakv.cache_for], ids=["compress", "cache_for"])


@MAKERS
def test_keywords_or_options(make: Any) -> None:
    model = matrix.model("llava")
    by_name = make(model, matrix.method("snapkv"), kv_dtype="int8", residual_length=4)
    as_one = make(model, matrix.method("snapkv"), options=CacheOptions(kv_dtype="int8", residual_length=4))
    assert by_name.options == as_one.options == CacheOptions(kv_dtype="int8", residual_length=4)
    assert make(model, matrix.method("snapkv")).options == CacheOptions()


@MAKERS
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_dtpye": "int8"}, r"unknown option 'kv_dtpye' \(did you mean 'kv_dtype'\?\); options: backend, "),
        ({"max_decoded_slots": 3}, "did you mean 'max_decode_slots'"),
        ({"prealocate": True}, "did you mean 'preallocate'"),
        ({"options": CacheOptions(), "trace": True}, "trace: give options either as keyword arguments or in options="),
        ({"options": {"trace": True}}, "must be a foveakv.CacheOptions, got dict"),
    ],
)
def test_calls_that_are_refused(make: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.MethodError, match=message):
        make(matrix.model("llava"), matrix.method("snapkv"), **given)


@pytest.mark.parametrize(
    "given",
    [
        {"backend": "fast"},
        {"backend": None},
        {"trace": "yes"},
        {"max_decode_slots": 0},
        {"max_decode_slots": True},
        {"max_decode_slots": 2.5},
        {"kv_dtype": "int3"},
        {"kv_dtype": 8},
        {"residual_length": -1},
        {"residual_length": 1.5},
        {"preallocate": 0},
        {"preallocate": "many"},
        {"preallocate": 2.5},
        {"preallocate": True, "kv_dtype": "int8"},
        {"preallocate": 4, "max_decode_slots": 4},
        {"preallocate": 4, "trace": True},
        {"preallocate": 4, "backend": "blocks"},
    ],
)
def test_values_that_are_refused_alone(given: dict[str, Any]) -> None:
    with pytest.raises(errors.MethodError):
        CacheOptions(**given)


@pytest.mark.parametrize("name", matrix.METHODS)
def test_every_method_takes_the_options_or_says_why_not(name: str) -> None:
    method = matrix.method(name)
    CacheOptions(kv_dtype="int4").check(method)
    for options in (CacheOptions(max_decode_slots=4), CacheOptions(preallocate=4)):
        changes = method.evicts_while_decoding or method.retrieves or method.observes.attention_sum
        changes = changes or method.observes.second_pass
        if method.evicts_while_decoding or (options.preallocate and changes):
            with pytest.raises(errors.MethodError, match=name):
                options.check(method)
        else:
            options.check(method)


def test_options_are_frozen_and_comparable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheOptions().trace = True  # type: ignore[misc]
    assert CacheOptions(preallocate=True).preallocated == 256
    assert CacheOptions(preallocate=False).preallocated is None
    assert dataclasses.replace(CacheOptions(), preallocate=7).preallocated == 7


def test_a_copy_of_a_cache_has_the_same_options() -> None:
    cache = foveakv.cache_for(families.build("llava"), matrix.method("snapkv"), max_decode_slots=9)
    assert copy.deepcopy(cache).options == cache.options
