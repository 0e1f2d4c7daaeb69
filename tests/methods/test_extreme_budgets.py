"""Budgets far above the prompt, budgets at or below a window, and rows of one token, for every method."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from families import Picture, Row

import foveakv
from foveakv.methods.lookm import LookM
from foveakv.methods.windows import kept_window

pytestmark = pytest.mark.usefixtures("no_gradients")

WITH_BUDGET = [name for name in matrix.METHODS if "budget" in matrix.fields(name)]
PROTECTING: list[tuple[str, dict[str, Any]]] = [
    ("hae", {"budget": 10**6, "recent": 10**5, "sink": 4, "relative": False, "r": 0.0}),
    ("hae", {"budget": "8GB", "recent": 10**5, "recycle_bin_size": 1, "r": 0.0}),
    ("hae", {"budget": None, "recent": 10**6, "sink": 10**6}),
    ("h2o", {"budget": 10**6, "heavy_ratio": 0.0}),
    ("h2o", {"budget": "8GB", "per_head_scores": False}),
    ("streaming", {"budget": 10**6, "sink": 10**5}),
    ("prefixkv", {"budget": 10**6, "sink": 10**5, "recent": 10**5}),
    ("lookm", {"budget": 10**6, "recent_ratio": 1.0}),
    ("snapkv", {"budget": 10**6, "window": 10**5}),
]
FAR_ABOVE = [(name, {"budget": budget}) for name in WITH_BUDGET for budget in (10**6, "8GB")] + PROTECTING
far_above = pytest.mark.parametrize(("name", "options"), FAR_ABOVE, ids=lambda value: str(value))


@far_above
def test_a_budget_far_above_the_prompt_stores_no_more_than_the_full_cache(name: str, options: dict[str, Any]) -> None:
    """In each of ten decode steps; `random` takes a share only, and its numbers are refused."""
    model, inputs = matrix.model("llava"), families.batch("llava").inputs
    try:
        method = matrix.method(name, **options)
        foveakv.compress(model, method)
    except foveakv.errors.FoveaKVError:
        assert name == "random"
        return
    sizes: list[int] = []
    full = matrix.compressed(model, foveakv.Full(), inputs, max_new_tokens=11)

    def note(*unused: Any) -> None:
        cache = session.cache
        runs = len(inputs["input_ids"]) * cache.geometry.kv_heads * len(cache.compressed)
        # A method's numbers of a slot (scores, marks, counts) are at most 16 bytes, positions are 4.
        slots = sum(layer.stored_slots for layer in cache.compressed)
        most = cache.seen * runs
        assert slots <= most
        dense = sum(layer.segments.nbytes for layer in cache.compressed)
        assert dense <= 1.5 * 2 * most * 16 * 4 + 4096 * runs, "room for decoded tokens grows with the budget"
        assert cache.state_nbytes <= 64 * runs + 24 * len(inputs["input_ids"]) * cache.seen
        sizes.append(cache.stored_nbytes)

    handle = model.register_forward_hook(note)
    try:
        with foveakv.compress(model, method) as session:
            model.generate(**inputs, **{**matrix.GREEDY, "max_new_tokens": 11})
            report = session.report
    finally:
        handle.remove()
    assert len(sizes) == 11
    slots = report.full_slots
    assert max(sizes) <= full.session.report.peak_bytes + 40 * slots
    if options["budget"] is not None:
        visual = sum(report.details.get("evicted_visual", [])) * 8  # by DAP, in all heads; no matter of the budget
        assert report.evicted == visual
        assert report.stored_bytes <= full.session.report.stored_bytes + 40 * slots


ONE_TOKEN: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in matrix.METHODS if not matrix.method(name).visual_only],
    ("hae", {"recent": 2, "sink": 1}),
    ("hae", {"recent": 2, "sink": 1, "recycle_bin_size": 1}),
    ("hae", {"recent": 3, "sink": 2, "per_head_scores": True, "mode": "mark"}),
    ("h2o", {"heavy_ratio": 0.0}),
    ("h2o", {"heavy_ratio": 1.0}),
    ("h2o", {"budget": 4}),
    ("streaming", {"sink": 2, "budget": 4}),
    ("prefixkv", {"sink": 2, "recent": 2}),
    ("lookm", {"recent_ratio": 1.0}),
    ("snapkv", {"window": 32}),
    ("vlcache", {"recent": 0.5}),
]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize(("name", "options"), ONE_TOKEN, ids=lambda value: str(value))
def test_a_row_of_one_token_beside_longer_ones(family: str, name: str, options: dict[str, Any]) -> None:
    """It runs, it equals the reference, and each row equals the row alone."""
    model, rows = matrix.model(family, torch.float64), [Row((5, Picture(), 9)), Row((), 1), Row((2,), 2)]
    inputs, method = families.encode(family, rows, torch.float64), matrix.method(name, **options)
    together = matrix.compressed(model, method, inputs)
    matrix.check_against_reference(model, together, inputs)
    for b, row in enumerate(rows):
        single = families.encode(family, [row], torch.float64)
        kept = together.tokens[b : b + 1, -matrix.GREEDY["max_new_tokens"] :]
        follow = torch.cat([single["input_ids"], kept], 1)
        alone = matrix.compressed(model, method, single, follow=follow)
        for step, logits in enumerate(alone.logits):
            assert (together.logits[step][b, -1] - logits[0, -1]).abs().max() < 1e-6


WINDOWED = ["snapkv", "adakv", "pyramidkv", "mixkv", "sparsemm", "hybridkv"]


def windowed(name: str, budget: int, **options: Any) -> Any:
    static = {"classify": "all_static", "head_level": False, "type_level": False} if name == "hybridkv" else {}
    static = {key: value for key, value in static.items() if key in matrix.fields(name)}
    return matrix.method(name, **{**static, "budget": budget, "window": 32, **options})


def kept_of_prompt(name: str, budget: int, **options: Any) -> tuple[list[list[int]], Any, int]:
    """Positions that every head of every layer keeps, the report, and the number of prompt tokens."""
    model, inputs = matrix.model("llava"), families.prompt("llava", images=4, text=12)
    run = matrix.compressed(model, windowed(name, budget, **options), inputs, max_new_tokens=1)
    held = [head[head >= 0].tolist() for kept in matrix.positions_held(run) for head in kept[0]]
    return held, run.session.report, inputs["input_ids"].shape[1]


@pytest.mark.parametrize("budget", [8, 16, 32])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_budget_at_or_below_the_window_keeps_tokens_by_score(name: str, budget: int) -> None:
    held, report, columns = kept_of_prompt(name, budget)
    assert columns > 100
    assert sum(map(len, held)) <= budget * len(held)
    for head in held:
        newest = set(range(columns - len(head), columns))
        # Methods that allocate across heads leave some of them no more than the window.
        assert name in ("adakv", "sparsemm") or set(head) != newest, "only the newest tokens are kept"
    by_score = sum(position < columns - 32 for head in held for position in head)
    assert by_score > 0, "no token before the window is kept"
    assert any("the budget is small for window=32" in note for note in report.notes), report.notes


@pytest.mark.parametrize("budget", [8, 16, 32])
@pytest.mark.parametrize("name", WINDOWED)
def test_the_papers_rule_keeps_the_newest_tokens_only(name: str, budget: int) -> None:
    held, _, columns = kept_of_prompt(name, budget, window_share=1)
    total = sum(map(len, held))
    assert total <= budget * len(held)
    small = [head for head in held if len(head) <= 32]
    assert small
    for head in small:
        assert head == list(range(columns - len(head), columns))
    if name in ("snapkv", "mixkv"):
        assert {len(head) for head in held} == {budget}


@pytest.mark.parametrize("name", ["snapkv", "mixkv"])
@pytest.mark.parametrize(("budget", "share"), [(8, 0.5), (16, 0.25), (32, 0.5), (10, 0.05)])
def test_the_window_gets_its_share(name: str, budget: int, share: float) -> None:
    held, _, columns = kept_of_prompt(name, budget, window_share=share)
    window = max(1, int(budget * share))
    assert window == int(kept_window(torch.tensor([budget]), torch.tensor([32]), share))
    for head in held:
        assert len(head) == budget
        assert set(range(columns - window, columns)) <= set(head)


def test_a_budget_above_the_window_has_no_note() -> None:
    for name in WINDOWED:
        _, report, _ = kept_of_prompt(name, 80)
        assert not any("the budget is small" in note for note in report.notes), name


def test_lookm_keeps_more_than_the_newest_of_a_small_budget() -> None:
    """Its window is a share of the budget in the paper already."""
    model, inputs = matrix.model("llava"), families.prompt("llava", images=4, text=12)
    run = matrix.compressed(model, LookM(budget=8), inputs, max_new_tokens=1)
    columns = inputs["input_ids"].shape[1]
    for kept in matrix.positions_held(run):
        assert ((kept[0] >= 0) & (kept[0] < columns - 8)).any(-1).all()
