"""HybridKV's automatic settings: classes, chunks and digests at the edges of their rules."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from hybridkv_runs import FAMILY, batch, check_reference, prompt, run
from hypothesis import given, settings
from hypothesis import strategies as st

from foveakv.core.budget import Geometry
from foveakv.methods import hybridkv_budgets as rules
from foveakv.methods.hybridkv import HybridKV


def geometry(*contexts: int, heads: int = 90, itemsize: int = 4) -> Geometry:
    return Geometry(len(contexts), contexts, heads, 1, 64, 64, itemsize)


def totals(at: Geometry, ratio: float) -> list[int]:
    return [int(ratio * context * at.heads) for context in at.contexts]


# ---- classes


@pytest.mark.parametrize(("dynamic", "paper"), [(1, False), (2, True), (5, True), (8, True), (9, False), (0, False)])
def test_theta_is_the_papers_while_both_classes_hold_a_sensible_share(dynamic: int, paper: bool) -> None:
    scores = torch.tensor([[0.8] * dynamic + [0.9] * (10 - dynamic)])
    scores = scores + torch.linspace(0, 0.05, 10)
    static = rules.auto_static(scores, text=50, total=1000)  # text needs less than the budget
    by_rule = round(rules.LEAST_DYNAMIC * 10)
    assert int((~static).sum()) == (dynamic if paper else by_rule)
    assert bool(scores[static].min() > scores[~static].max())  # the lowest scores are dynamic


@pytest.mark.parametrize(
    ("need", "share"), [(0.0, 0.7), (1.0, 0.7), (1.5, 0.7), (1.75, 0.75), (2.0, 0.8), (9, 0.8), (float("inf"), 0.8)]
)
def test_the_share_of_dynamic_heads_leaves_static_ones_what_text_needs(need: float, share: float) -> None:
    found = rules.dynamic_share(need) if need != float("inf") else rules.dynamic_share(1e9)
    assert found == pytest.approx(share, abs=0.006)
    if 1.6 <= need <= 2.0:
        assert (1 - 0.75 * found) / (1 - found) == pytest.approx(need)


@pytest.mark.parametrize(
    ("kept", "text", "rho"),
    [(2, 200, 0.75), (2, 201, 1.2), (3, 158, 0.75), (3, 159, 0.94 / 0.7), (8, 106, 0.75), (8, 107, 1.5), (0, 999, 0.75),
     (10, 999, 0.75)],
)  # fmt: skip
def test_rho_is_the_papers_while_static_heads_hold_the_text(kept: int, text: int, rho: float) -> None:
    """Ten heads share 1000 slots; the static ones get (1 - 0.75 d) / (1 - d) times 100."""
    static = torch.arange(10).view(5, 2) < kept
    assert rules.auto_rho(static, text, 1000) == pytest.approx(rho)
    if rho not in (0.75, 1.5):  # static heads are left a fifth of the mean
        assert (1000 - rho * 100 * (10 - kept)) / kept == pytest.approx(20)


def test_equal_scores_are_split_too() -> None:
    for value in (0.0, 0.5, 0.95, 1.0):
        static = rules.auto_static(torch.full((4, 2), value), text=10**6, total=8)
        assert int((~static).sum()) == round(8 * 0.8)


def test_too_many_dynamic_heads_make_the_highest_scored_static() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.1, 0.4, 0.2, 0.9]])
    static = torch.tensor([[False, False, False, True]] * 2)
    assert rules.fewer_dynamic(scores, static, [2, 0]).tolist() == [[False, True, False, True], [True] * 4]
    assert rules.fewer_dynamic(scores, static, [3, 4]).tolist() == static.tolist()
    assert rules.fewer_dynamic(scores, static, [-1, 3]).tolist() == [[True] * 4, [False, False, False, True]]


# ---- chunks and digests


@pytest.mark.parametrize(
    ("ratio", "itemsize", "context", "digests"),
    [
        (0.5, 4, 3, ("int8", 4)), (0.2, 4, 1000, ("int8", 4)), (0.1, 4, 1000, ("int8", 4)),
        (0.09, 4, 1000, ("int4", 4)), (0.05, 4, 1000, ("int4", 4)), (0.04, 4, 1000, ("int4", 8)),
        (0.001, 4, 1000, ("int4", 8)),
        (0.2, 2, 1000, ("int8", 4)), (0.1, 2, 1000, ("int4", 4)), (0.05, 2, 1000, ("int4", 8)),
        (0.2, 4, 1279, ("int8", 4)),
        (0.2, 4, 1280, ("int8", 8)),
        (0.1, 2, 8000, ("int8", 8)),
        (0.02, 2, 8000, ("int4", 8)), (0.02, 2, 16_000, ("int4", 16)), (0.01, 2, 64_000, ("int4", 32)),
    ],
)  # fmt: skip
def test_digests_shrink_until_they_take_a_quarter(
    ratio: float, itemsize: int, context: int, digests: tuple[str, int]
) -> None:
    """int8: a chunk of 4 takes 1/32 of a float32 head's cache, and 1/16 of a bfloat16 one's; 80% are dynamic."""
    at = geometry(context, itemsize=itemsize)
    assert rules.auto_digests(at, "auto", "auto", totals(at, ratio), 0.8) == digests


def test_what_is_not_automatic_stays() -> None:
    at = geometry(1000)
    assert rules.auto_digests(at, "model", 4, totals(at, 0.05), 0.8) == ("model", 4)
    assert rules.auto_digests(at, "int8", "auto", totals(at, 0.05), 0.8) == ("int8", 8)
    assert rules.auto_digests(at, "auto", 2, totals(at, 0.19), 0.8) == ("int4", 2)
    assert rules.auto_digests(at, "auto", "auto", totals(at, 0.01), 0.0) == ("int8", 4)


def test_a_batch_has_the_digests_of_the_sequence_that_needs_the_smallest() -> None:
    at = geometry(1000, 16_000, itemsize=2)
    assert rules.auto_digests(at, "auto", "auto", totals(at, 0.02), 0.8) == ("int4", 16)


@settings(max_examples=200, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    ratio=st.floats(0.001, 1),
    itemsize=st.sampled_from([2, 4]),
    kind=st.sampled_from(["int4", "int8", "bf16", "model"]),
    chunk=st.sampled_from([1, 3, 4, 8, 32]),
)
def test_digests_take_at_most_a_quarter(contexts: Any, ratio: float, itemsize: int, kind: Any, chunk: int) -> None:
    at = geometry(*contexts, itemsize=itemsize)
    slots = [max(n, at.heads) for n in totals(at, ratio)]
    most = rules.most_dynamic(at, kind, chunk, slots)
    left = rules.minus_digests(at, kind, chunk, slots, most)
    for context, total, count, rest in zip(contexts, slots, most, left, strict=True):
        assert 0 <= count <= at.heads
        if total >= context * at.heads:
            assert (count, rest) == (at.heads, total)
        else:
            assert count * rules.digest_slots(at, kind, chunk, context) <= total / 4
            assert rest >= min(total, max(at.heads, 0.75 * total - 1))


# ---- in runs


@pytest.mark.parametrize("ratio", [0.03, 0.06, 0.1, 0.3])
@pytest.mark.parametrize("options", [{}, {"theta": 1.0}, {"theta": 0.76, "chunk_size": 2}, {"theta_quantile": 0.9}])
def test_a_run_holds_the_rules(ratio: float, options: dict[str, Any]) -> None:
    inputs = families.prompt(FAMILY, images=6, text=30)
    _, _, session = run(HybridKV(budget=ratio, **options), inputs, max_new_tokens=2)
    cache, report = session.cache, session.report
    budget = ratio * cache.geometry.token_bytes * cache.prompt_columns
    assert report.details["digest_bytes"] <= budget / 4
    heads = cache.results.heads
    assert int(heads.budgets.sum()) == int(cache.state.total) or bool(heads.static.logical_not().all())
    refused = int(cache.state.refused.sum())
    assert any(f"{refused} heads are static that would be dynamic" in note for note in report.notes) == (refused > 0.8)


def test_fewer_heads_are_dynamic_layer_by_layer_with_a_threshold() -> None:
    """With a number as theta heads are classified as their layer is read; the allowed ones are spread over layers."""
    inputs = families.prompt(FAMILY, images=6, text=30)
    method = HybridKV(budget=0.1, theta=1.0, chunk_size=4, digest_dtype="model")
    _, _, session = run(method, inputs, max_new_tokens=2)
    state, heads = session.cache.state, session.cache.results.heads
    dynamic = (~heads.static).sum(-1)[0].tolist()
    assert sum(dynamic) == int(state.most) < heads.static.numel() * 0.5
    assert max(dynamic) - min(dynamic) <= 1
    assert int(state.refused) == heads.static.numel() - sum(dynamic)


def test_the_defaults_on_a_padded_batch_equal_the_masked_model() -> None:
    check_reference(HybridKV(budget=0.3), batch().inputs)
    check_reference(HybridKV(budget=0.3, visual_share=0.5), prompt())


def test_without_both_levels_all_heads_have_one_budget() -> None:
    """The paper's ablation without H and HT."""
    method = HybridKV(budget=0.4, theta_quantile=0.5, head_level=False, type_level=False, chunk_size=4)
    _, _, session = run(method, prompt(), max_new_tokens=2)
    budgets = session.cache.results.heads.budgets
    static = session.cache.results.heads.static
    assert 0 < int(static.sum()) < static.numel()
    assert int(budgets[static].max() - budgets[static].min()) <= 1
    assert 0 <= int(budgets[static].min()) - int(budgets[~static].max()) < 2 * 4


def test_the_report_says_what_does_not_fit() -> None:
    inputs = families.prompt(FAMILY, images=6, text=60)
    notes = " ".join(run(HybridKV(budget=0.05), inputs, max_new_tokens=2)[2].report.notes)
    assert "static heads do not hold the text of the prompt" in notes
    notes = " ".join(run(HybridKV(budget=0.05, rho=0.75), inputs, max_new_tokens=2)[2].report.notes)
    assert "does not fit the budgets of static heads" in notes
    notes = " ".join(run(HybridKV(budget=0.05, classify="all_dynamic", chunk_size=4), inputs)[2].report.notes)
    assert "of the budget; use larger chunks" in notes
    notes = " ".join(run(HybridKV(budget=5, classify="all_dynamic", chunk_size=8), inputs)[2].report.notes)
    assert "8 dynamic heads keep their newest tokens only" in notes
    notes = " ".join(run(HybridKV(budget=0.6), inputs, max_new_tokens=2)[2].report.notes)
    assert "does not fit" not in notes
    assert "newest tokens only" not in notes


def test_a_small_mean_budget_does_not_overrule_rho() -> None:
    """The guaranteed minimum is at most half of the mean budget, so dynamic heads stay at rho times the mean."""
    method = HybridKV(budget=20, window=32, theta_quantile=0.5, chunk_size=2, digest_dtype="int8", rho=0.75)
    _, _, session = run(method, prompt(), max_new_tokens=2)
    heads = session.cache.results.heads
    mean = int(session.cache.state.total) / heads.budgets.numel()
    assert float(heads.budgets[~heads.static].float().mean()) <= 0.75 * mean + 1
    assert int(heads.budgets.min()) >= int(mean) // 2
