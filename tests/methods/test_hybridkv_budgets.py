"""HybridKV's budgets, the memory that it reports, and its options."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from hybridkv_runs import FAMILY, MIXED, batch, check_reference, prompt, run

import foveakv
from foveakv.errors import MethodError, StoreError
from foveakv.methods.hybridkv import HybridKV

# ---- budgets and accounting


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.35, 0.8, 1.0, 3, 40, "4KB", "64KiB"])
@pytest.mark.parametrize(
    "options",
    [{}, {"theta_quantile": 0.4}, {"theta_quantile": 0.4, "rounding": "nearest"}, {"classify": "all_dynamic"},
     {"theta_quantile": 0.4, "rounding": "down", "spend_rest": True}, {"theta": 0.75}, {"theta": 0.75, "chunk_size": 2},
     {"theta_quantile": 0.8, "chunk_size": 2, "digest_dtype": "model"}, {"theta_quantile": 0.4, "visual_share": 0.5},
     {"classify": "all_static"}, {"theta_quantile": 0.7, "type_level": False}, {"theta_quantile": 0.2, "rho": 3.0}],
)  # fmt: skip
def test_budgets_are_never_exceeded(budget: Any, options: dict[str, Any]) -> None:
    for inputs in (prompt(), batch().inputs):
        try:
            _, _, session = run(HybridKV(budget=budget, **options), inputs, max_new_tokens=2)
        except foveakv.errors.BudgetError:
            assert budget == "4KB"  # not even one token per head
            continue
        cache, heads = session.cache, session.cache.results.heads
        assert bool((heads.slots <= heads.budgets).all())
        assert bool((heads.budgets.sum((1, 2)) <= cache.state.total).all())
        for layer in cache.compressed:
            held = layer.segments.lengths - 1  # one decoded token
            if layer.store is not None:
                held += layer.store.chosen_slots
            assert torch.equal(held, heads.slots[:, layer.compressed_idx])
            assert layer.stored_slots == int((held + 1).sum())


def test_the_rest_of_rounding_down_goes_to_static_heads() -> None:
    options: dict[str, Any] = {"budget": 0.35, "theta_quantile": 0.4, "window": 4, "chunk_size": 8}
    left, spent = (
        run(HybridKV(**options, rounding="down", spend_rest=spend), prompt(), max_new_tokens=2)[2]
        for spend in (False, True)
    )
    total = spent.cache.state.total
    left, spent = (session.cache.results.heads for session in (left, spent))
    assert torch.equal(spent.static, left.static)
    assert torch.equal(spent.budgets[~left.static], left.budgets[~left.static])
    assert int(left.budgets.sum()) < int(spent.budgets.sum()) == int(total)


def test_one_decode_step_with_a_budget_smaller_than_a_chunk_keeps_the_newest() -> None:
    method = HybridKV(budget=5, classify="all_dynamic", chunk_size=8)
    session = check_reference(method)
    columns = session.cache.prompt_columns
    assert session.report.retrieved == 0
    for layer in range(families.LAYERS):
        kept = session.trace[1][layer]
        assert bool((kept[0, :, : int(session.cache.results.heads.slots[0, layer, 0])] >= columns - 5).all())


def test_slots_are_evicted_or_kept_or_stored() -> None:
    for inputs in (prompt(), batch().inputs):
        _, _, session = run(HybridKV(**MIXED, count_digests=False), inputs)
        for layer, report in zip(session.cache.compressed, session.report.layers, strict=True):
            stored = 0 if layer.store is None else layer.store.extra_slots
            assert report.evicted + report.stored_slots + stored == report.full_slots
            static = session.cache.results.heads.static[:, layer.compressed_idx]
            if not bool(static.any()):
                assert report.evicted == 0
            assert (report.retrieved > 0) == (not bool(static.all()))
        assert 0 < session.report.hit_rate < 1


@pytest.mark.parametrize("store", ["host", "device", "disk"])
def test_reported_bytes_are_those_of_the_tensors(store: Any) -> None:
    from matrix import Run, check_storage

    tokens, logits, session = run(HybridKV(**MIXED, store=store), batch().inputs)
    assert (session.report.host_bytes == 0) == (store == "device")
    check_storage(Run(tokens, logits, session.cache, session))


def test_the_device_holds_less_than_a_full_cache() -> None:
    inputs = families.prompt(FAMILY, images=8, text=60)
    _, _, session = run(
        HybridKV(budget=0.1, classify="all_dynamic", window=8, chunk_size=8, digest_dtype="model"), inputs
    )
    report = session.report
    heads = families.LAYERS * families.KV_HEADS
    assert report.details["digest_bytes"] == heads * (session.cache.prompt_columns // 8) * 16 * 4
    # What is read in place counts where a copy would have been.
    in_place = sum(int(layer.store.chosen_slots.sum()) for layer in session.cache.compressed)
    assert report.host_bytes == (heads * (session.cache.prompt_columns // 8 * 8) - in_place) * 32 * 4
    assert report.stored_bytes < 0.4 * report.full_bytes
    # Layers shrink one after the other, so even the peak stays below the whole.
    assert report.peak_bytes < 0.75 * report.full_bytes


@pytest.mark.parametrize("digest_dtype", ["model", "bf16", "int8", "int4"])
@pytest.mark.parametrize("classify", ["auto", "all_dynamic", "all_static"])
def test_digests_are_paid_from_the_budget(classify: str, digest_dtype: str) -> None:
    """Slots and digests together fit the budget; without `count_digests` the digests come on top."""
    used = {}
    for counted in (True, False):
        options = {**MIXED, "classify": classify, "budget": 0.5, "min_budget": 4, "count_digests": counted}
        _, _, session = run(HybridKV(**{**options, "digest_dtype": digest_dtype}), prompt(), max_new_tokens=1)
        cache = session.cache
        heads, context = cache.geometry.heads, int(cache.geometry.contexts[0])
        digests = cache.results.figures["digest_bytes"] / (2 * 16 * 4)  # in slots
        used[counted] = int(cache.results.heads.slots.sum()) + digests
        assert int(cache.state.total) <= 0.5 * context * heads
    assert used[True] <= 0.5 * context * heads
    assert used[True] <= used[False]


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": 1.5}, "theta must be a number between 0 and 1"),
        ({"theta_quantile": -0.1}, "theta_quantile must be a number between 0 and 1"),
        ({"alpha": 2}, "alpha must be a number between"),
        ({"k_ratio": "a"}, "k_ratio must be a number between"),
        ({"rho": -1}, "rho must be a number, at least 0"),
        ({"rho": float("nan")}, "rho must be a number, at least 0"),
        ({"window": 0}, "window must be a whole number, at least 1"),
        ({"chunk_size": 0}, "chunk_size must be a whole number, at least 1"),
        ({"chunk_size": 2.5}, "chunk_size must be a whole number, at least 1"),
        ({"max_text_rows": 0}, "max_text_rows must be a whole number, at least 1"),
        ({"min_budget": 0}, "min_budget must be a whole number, at least 1"),
        ({"text_rows": "none"}, "text_rows must be one of 'after_visual' or 'all'"),
        ({"store": "cloud"}, "store must be one of 'host', 'device' or 'disk'"),
        ({"classify": "static"}, "classify must be one of 'auto'"),
        ({"rounding": "up"}, "rounding must be one of 'chunks', 'down' or 'nearest'"),
        ({"store_dir": "/tmp"}, 'store="disk" only'),
        ({"digest_dtype": "int2"}, "digest_dtype must be one of 'auto', 'model', 'bf16', 'int8' or 'int4'"),
    ],
)
def test_wrong_options_say_what_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        HybridKV(**options)


def test_a_store_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Any) -> None:
    with pytest.raises(StoreError, match="gone"):
        run(HybridKV(store="disk", store_dir=str(tmp_path / "gone")))
    run(HybridKV(store="disk", store_dir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_presets() -> None:
    paper, small = HybridKV.preset("paper", budget=0.2), HybridKV.preset("small")
    stated = {
        "theta": 0.9, "rho": 0.75, "chunk_size": 8, "rounding": "nearest", "text_rows": "all", "max_text_rows": None,
        "min_budget": 1, "window_share": 1.0, "visual_share": 0.0, "digest_dtype": "model", "count_digests": False,
        "spend_rest": False, "budget": 0.2,
    }  # fmt: skip
    assert {option: getattr(paper, option) for option in stated} == stated
    assert (small.theta_quantile, small.window, small.chunk_size, small.digest_dtype) == (0.7, 8, 4, "int8")
    assert (small.rounding, small.spend_rest, small.visual_share, small.min_budget) == ("down", False, 0.0, 8)
    with pytest.raises(MethodError, match="paper, small"):
        HybridKV.preset("large")
