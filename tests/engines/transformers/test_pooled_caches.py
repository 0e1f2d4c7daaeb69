"""Caches in a pool: the same tokens, logits and slots as with buffers of their own; forks cost what they add."""

from __future__ import annotations

import copy
import gc
from typing import Any

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference

import foveakv
from foveakv import errors
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.memory.paged import PagedSegments

pytestmark = pytest.mark.usefixtures("no_gradients")

METHODS = ["full", "snapkv", "hae", "h2o", "hybridkv", "quest", "streaming", "fastv"]
FAMILIES = ["qwen2_5_vl", "llava"]


def compared(name: str, family: str, page_size: int, dtype: torch.dtype, modes: dict[str, Any], **given: Any) -> Any:
    """The runs without and with a pool on the same tokens, and how far their logits differ."""
    model, inputs = matrix.model(family, dtype), families.batch(family, dtype=dtype).inputs
    plain = matrix.compressed(model, matrix.method(name), inputs, session_options=given, **modes)
    pool = foveakv.Pool(page_size=page_size)
    follow = None if dtype == torch.float64 else plain
    options = {"pool": pool, **given}
    paged = matrix.compressed(model, matrix.method(name), inputs, follow=follow, session_options=options, **modes)
    assert torch.equal(plain.tokens, paged.tokens)
    assert all(isinstance(layer.segments, PagedSegments) for layer in paged.cache.compressed)
    for layer in plain.cache.compressed:
        assert torch.equal(plain.cache.kept(layer.layer_idx), paged.cache.kept(layer.layer_idx))
    for step, other in zip(plain.trace, paged.trace, strict=True):
        assert step.keys() == other.keys()
        assert all(torch.equal(step[layer], other[layer]) for layer in step)
    assert plain.session.report.evicted == paged.session.report.evicted
    return paged, largest_difference(list(paged.logits), list(plain.logits))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("modes", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_as_with_buffers_of_its_own(name: str, family: str, modes: dict[str, Any]) -> None:
    """Two sequences with padding."""
    paged, difference = compared(name, family, 8, torch.float64, modes)
    assert difference < 1e-9
    if not paged.cache.method.merges:
        inputs = families.batch(family, dtype=torch.float64).inputs
        matrix.check_against_reference(matrix.model(family, torch.float64), paged, inputs, **modes)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_quantized(name: str, kv_dtype: str) -> None:
    _, difference = compared(name, "llava", 16, torch.float32, {}, kv_dtype=kv_dtype, residual_length=4)
    assert difference < 1e-4


def start(model: Any, inputs: dict[str, Any], name: str, **given: Any) -> CompressedCache:
    cache = foveakv.cache_for(model, matrix.method(name), **given)
    model(**inputs, **{matrix.cache_argument("qwen2_5_vl"): cache}, use_cache=True)
    return cache


def step(model: Any, cache: CompressedCache, token: int) -> torch.Tensor:
    ids = torch.tensor([[token]]).expand(cache.full_prompt.batch, 1)
    logits: torch.Tensor = model(input_ids=ids, **{matrix.cache_argument("qwen2_5_vl"): cache}, use_cache=True).logits
    return logits


@pytest.mark.parametrize("name", METHODS)
def test_forks_answer_as_caches_of_their_own(name: str) -> None:
    model, inputs = matrix.model("qwen2_5_vl", torch.float64), families.batch("qwen2_5_vl", dtype=torch.float64).inputs
    questions = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25], [31, 32]]
    want = []
    for question in questions:
        alone = start(model, inputs, name)
        want.append([step(model, alone, token) for token in question])
    pool = foveakv.Pool(page_size=8)
    prompt = start(model, inputs, name, pool=pool)
    forks = [prompt.fork() for _ in questions]
    got: list[list[torch.Tensor]] = [[] for _ in questions]
    for turn in range(5):  # in turns, so that each writes between the others
        for i, question in enumerate(questions):
            if turn < len(question):
                got[i].append(step(model, forks[i], question[turn]))
    late = prompt.fork()
    assert largest_difference([step(model, late, token) for token in questions[0]], want[0]) < 1e-9
    for found, expected in zip(got, want, strict=True):
        assert largest_difference(found, expected) < 1e-9


def pages_of(cache: CompressedCache) -> int:
    return sum(layer.segments.pages for layer in cache.compressed if isinstance(layer.segments, PagedSegments))


def test_questions_about_one_prompt_cost_it_once() -> None:
    model, inputs = matrix.model("qwen2_5_vl"), families.batch("qwen2_5_vl").inputs
    pool = foveakv.Pool(page_size=8)
    prompt = start(model, inputs, "full", pool=pool)
    runs = sum(layer.segments.lengths.numel() for layer in prompt.compressed if layer.segments is not None)
    once = pool.use().pages
    assert once == pages_of(prompt) > 4 * runs
    forks = [prompt.fork() for _ in range(5)]
    assert pool.use().pages == once
    assert pool.use().stored == 6 * prompt.compressed[0].stored_slots * len(prompt.compressed)
    for fork in forks:
        for token in range(20, 30):
            step(model, fork, token)
        # Ten tokens in each run are at most two more pages, and a copy of the page they began in.
        assert pool.use().pages <= once + 5 * runs * 3
    assert all(pages_of(fork) <= once + 2 * runs for fork in forks)
    first = step(model, prompt.fork(), 20)
    del forks, fork
    gc.collect()
    assert pool.use().pages == once
    assert torch.equal(step(model, prompt.fork(), 20), first)
    del prompt
    gc.collect()
    use = pool.use()
    assert use.pages == use.held == use.stored == use.side == 0


def test_forks_without_a_pool_are_copies() -> None:
    model, inputs = matrix.model("qwen2_5_vl"), families.batch("qwen2_5_vl").inputs
    prompt = start(model, inputs, "snapkv")
    fork = prompt.fork()
    assert fork.stored_nbytes == prompt.stored_nbytes
    assert torch.equal(step(model, fork, 7), step(model, prompt, 7))
    prompt.forward_tokens = 1
    with pytest.raises(errors.CacheInUseError, match="between passes"):
        prompt.fork()


def test_a_full_pool_says_what_would_fit_and_stays_usable() -> None:
    model, inputs = matrix.model("qwen2_5_vl"), families.batch("qwen2_5_vl").inputs
    pool = foveakv.Pool("256KiB", page_size=8)
    caches: list[Any] = []
    full = r"the pool of 256 KiB is full: .* would fit .*make the pool larger"
    with pytest.raises(errors.PoolFullError, match=full):  # noqa: PT012
        while True:
            caches.append(start(model, inputs, "full", pool=pool))
    assert caches
    gc.collect()
    assert pool.use().held <= 256 * 1024
    assert pool.use().pages == sum(map(pages_of, caches))
    caches.pop()
    gc.collect()
    caches.append(start(model, inputs, "full", pool=pool))
    assert copy.deepcopy(pool) is pool


def test_pools_are_checked() -> None:
    model = matrix.model("qwen2_5_vl")
    for wrong in ("2GiB", 5, True):
        with pytest.raises(errors.MethodError, match=r"pool must be a foveakv\.Pool"):
            foveakv.cache_for(model, matrix.method("snapkv"), pool=wrong)
    with pytest.raises(errors.MethodError, match="preallocate and pool cannot be combined"):
        foveakv.cache_for(model, matrix.method("snapkv"), pool=foveakv.Pool(), preallocate=True)
