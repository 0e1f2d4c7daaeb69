"""HybridKV against its equations, computed the slow way from what the plain model attends to."""

from __future__ import annotations

import math
from typing import Any

import families
import matrix
import pytest
import torch
from hybridkv_runs import (
    BACKENDS,
    FAMILY,
    GREEDY,
    MIXED,
    attentions,
    batch,
    check_reference,
    generated,
    model,
    naive_score,
    prompt,
    run,
)
from masked_reference import largest_difference, recorded

import foveakv
from foveakv.core.prompt import IMAGE, PAD, TEXT, PromptMap
from foveakv.errors import UnsupportedModeError
from foveakv.methods.hybridkv import HybridKV
from foveakv.methods.text_first import text_first
from foveakv.methods.windows import kept_window

# ---- head scores and classes


@pytest.mark.parametrize("rows", ["after_visual", "all"])
@pytest.mark.parametrize("ratio", [0.05, 0.2])
def test_scores_are_equation_3(rows: Any, ratio: float) -> None:
    inputs = batch().inputs
    _, _, session = run(HybridKV(text_rows=rows, k_ratio=ratio, max_text_rows=10_000), inputs, max_new_tokens=1)
    got = session.cache.results.heads.scores
    kinds = session.cache.prompt.kinds
    for layer, probabilities in enumerate(attentions(inputs)):
        for b in range(len(kinds)):
            want = torch.tensor(naive_score(probabilities[b], kinds[b], rows, ratio))
            torch.testing.assert_close(got[b, layer], want, rtol=1e-4, atol=1e-5)


def test_heads_are_static_from_theta_upwards() -> None:
    _, _, session = run(HybridKV(**MIXED), max_new_tokens=1)
    scores = session.cache.results.heads.scores[0]
    middle = scores.flatten().sort().values[3]
    _, _, session = run(HybridKV(theta=float(middle)), max_new_tokens=1)
    static = session.cache.results.heads.static[0]
    assert torch.equal(static, scores >= middle)
    assert int(static.sum()) == scores.numel() - 3


@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.5, 1.0])
def test_theta_quantile_is_taken_per_sequence(quantile: float) -> None:
    _, _, session = run(HybridKV(theta_quantile=quantile, budget=0.5), batch().inputs, max_new_tokens=1)
    heads = session.cache.results.heads
    for scores, static in zip(heads.scores, heads.static, strict=True):
        threshold = scores.double().flatten().quantile(quantile)
        assert torch.equal(static, scores.double() >= threshold)


def test_a_prompt_without_images_is_scored_by_all_its_text() -> None:
    inputs = families.prompt(FAMILY, images=0, text=40)
    _, _, session = run(HybridKV(max_text_rows=10_000), inputs, max_new_tokens=1)
    got = session.cache.results.heads.scores
    for layer, probabilities in enumerate(attentions(inputs)):
        want = torch.tensor(naive_score(probabilities[0], session.cache.prompt.kinds[0], "all"))
        torch.testing.assert_close(got[0, layer], want, rtol=1e-4, atol=1e-5)


# ---- static heads


def text_prior(scores: torch.Tensor, at: PromptMap, budgets: list[list[int]], window: int) -> torch.Tensor:
    """What static heads keep with the paper's window_share=1 and visual_share=0."""
    sizes = torch.tensor(budgets)
    return text_first(scores, at.text, at.real, sizes, kept_window(sizes, torch.tensor([[window]]), 1.0))


def test_text_prior_order_by_hand() -> None:
    #                 0     1      2      3     4      5      6     7     8      9
    kinds = torch.tensor([[TEXT, IMAGE, IMAGE, TEXT, IMAGE, IMAGE, TEXT, TEXT, IMAGE, TEXT]])
    scores = torch.tensor([[[0.01, 0.09, 0.20, 0.02, 0.05, 0.30, 0.03, 0.04, 0.001, 0.0]]])
    at = PromptMap(kinds)
    expected = {
        1: {9},  # below the window: the newest
        2: {8, 9},
        3: {8, 9, 7},  # text alone exceeds budget - window: the best-scored text
        4: {8, 9, 7, 6},
        5: {8, 9, 7, 6, 3},
        6: {8, 9, 7, 6, 3, 0},  # all text and the window
        7: {8, 9, 7, 6, 3, 0, 5},  # then visual tokens by score
        8: {8, 9, 7, 6, 3, 0, 5, 2},
        10: set(range(10)),
        99: set(range(10)),
    }
    for budget, columns in expected.items():
        keep = text_prior(scores, at, [[budget]], 2)
        assert set(keep[0, 0].nonzero()[:, 0].tolist()) == columns, budget


def test_text_prior_ignores_padding_on_either_side() -> None:
    kinds = torch.tensor([[PAD, PAD, TEXT, IMAGE, IMAGE, TEXT], [TEXT, IMAGE, IMAGE, TEXT, PAD, PAD]])
    at = PromptMap(kinds)
    scores = torch.tensor([[[9.0, 9, 0.1, 0.3, 0.2, 0]], [[0.1, 0.3, 0.2, 0, 9.0, 9]]])
    keep = text_prior(scores, at, [[3], [3]], 1)
    assert keep[:, 0].int().tolist() == [[0, 0, 1, 1, 0, 1], [1, 1, 0, 1, 0, 0]]


def test_all_static_with_equal_budgets_is_uniform_text_prior_pruning() -> None:
    inputs, window = batch().inputs, 6
    method = HybridKV(budget=0.4, classify="all_static", head_level=False, window=window, window_share=1)
    session = check_reference(method, inputs)
    kinds, budgets = session.cache.prompt.kinds, session.cache.results.heads.budgets
    group = families.HEADS // families.KV_HEADS
    for b in range(len(kinds)):
        total = math.floor(0.4 * int((kinds[b] != PAD).sum()) * budgets[b].numel() + 1e-9)
        assert int(budgets[b].sum()) == total
        assert int(budgets[b].max() - budgets[b].min()) <= 1
    for layer, probabilities in enumerate(attentions(inputs)):
        for b in range(len(kinds)):
            real = [c for c in range(kinds.shape[1]) if kinds[b, c] != PAD]
            for h in range(families.KV_HEADS):
                score = probabilities[b, h * group : (h + 1) * group, real[-window:]].mean((0, 1))
                ranked = [
                    *sorted(real[-window:], reverse=True),
                    *sorted((c for c in real[:-window] if kinds[b, c] == TEXT), key=lambda c: -score[c]),
                    *sorted((c for c in real[:-window] if kinds[b, c] != TEXT), key=lambda c: -score[c]),
                ]
                kept = [p for p in session.kept(layer)[b, h].tolist() if 0 <= p < kinds.shape[1]]
                assert kept == sorted(ranked[: int(budgets[b, layer, h])])


def test_static_heads_stay_as_they_are_while_decoding() -> None:
    _, _, session = run(HybridKV(budget=0.3, classify="all_static", window=6))
    assert not HybridKV(classify="all_static").retrieves
    assert session.report.host_bytes == 0
    assert session.report.retrieved == 0
    assert session.report.evicted > 0
    columns = session.cache.prompt_columns
    for layer in range(families.LAYERS):
        after_prompt, at_end = session.trace[1][layer], session.trace[-1][layer]
        before = [set(x[(x >= 0) & (x < columns)].tolist()) for x in after_prompt.flatten(0, 1)]
        assert before == [set(x[(x >= 0) & (x < columns)].tolist()) for x in at_end.flatten(0, 1)]


# ---- whole runs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inputs", ["one", "padded"])
@pytest.mark.parametrize(
    "options",
    [
        MIXED,
        {"theta": 0.76, "budget": 0.4, "window": 4},
        {"classify": "all_dynamic", "budget": 0.5, "window": 4},
        {"classify": "all_static", "budget": 0.3, "window": 4},
        {**MIXED, "type_level": False},
        {**MIXED, "head_level": False},
        {**MIXED, "rounding": "nearest"},
        {**MIXED, "spend_rest": True},
        {**MIXED, "store": "device"},
        {**MIXED, "store": "disk"},
        {**MIXED, "budget": 0.1},
        {**MIXED, "budget": 20},
        {**MIXED, "budget": 1, "chunk_size": 3},
        {**MIXED, "digest_dtype": "bf16"},
        {**MIXED, "digest_dtype": "int8"},
        {**MIXED, "digest_dtype": "int4", "chunk_size": 2},
    ],
)
def test_logits_are_those_of_the_masked_model(options: dict[str, Any], inputs: str, backend: str) -> None:
    check_reference(HybridKV(**options), prompt() if inputs == "one" else batch().inputs, backend=backend)


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 1.0},
        {"budget": 1.0, "classify": "all_dynamic"},
        {"budget": 1.0, "classify": "all_static"},
        {"budget": 1.0, "theta_quantile": 0.5},
        {"budget": 1.0, "theta_quantile": 0.5, "type_level": False},
        {"budget": 100_000, "theta_quantile": 0.5, "store": "disk"},
    ],
)
def test_a_full_budget_is_full_attention(options: dict[str, Any]) -> None:
    for inputs in (prompt(), batch().inputs):
        want = matrix.plain(model(), inputs, **GREEDY)
        found = generated(HybridKV(**options), inputs, follow=want)
        assert largest_difference(found.logits, want.logits) < 1e-5
        matrix.check_choices(found, 1e-5)
        assert found.session.report.notes  # nothing was evicted or chosen, and the report says so


def test_a_full_budget_is_full_attention_in_double_precision() -> None:
    double = families.build(FAMILY, dtype=torch.float64)
    inputs = families.prompt(FAMILY, images=2, dtype=torch.float64)
    with recorded(double) as want:
        double.generate(**inputs, **GREEDY)
    with foveakv.compress(double, HybridKV(budget=1.0, theta_quantile=0.5)), recorded(double) as got:
        double.generate(**inputs, **GREEDY)
    assert largest_difference(got, want) < 1e-12


# ---- generation modes


def test_a_row_of_a_padded_batch_is_the_row_alone() -> None:
    double, rows = matrix.model(FAMILY, torch.float64), families.batch(FAMILY, dtype=torch.float64)
    width = rows.inputs["input_ids"].shape[1]
    for options in (MIXED, {"theta": 0.76, "budget": 0.5, "window": 4}):
        together = matrix.compressed(double, HybridKV(**options), rows.inputs, **GREEDY)
        for b, single in enumerate(rows.singles):
            alone = matrix.compressed(double, HybridKV(**options), single, **GREEDY)
            assert torch.equal(together.tokens[b, width:], alone.tokens[0, single["input_ids"].shape[1] :])
            own = [step[b : b + 1] for step in together.logits]
            assert largest_difference(own, alone.logits) < 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [MIXED, {"classify": "all_dynamic", "budget": 0.5, "window": 4}])
def test_beam_search(options: dict[str, Any], backend: str) -> None:
    for inputs in (prompt(), batch().inputs):
        check_reference(HybridKV(**options), inputs, num_beams=3, backend=backend)


def test_cropping_into_the_prompt_is_refused() -> None:
    with foveakv.compress(model(), HybridKV(classify="all_dynamic", budget=0.5, window=4)) as session:
        model().generate(**prompt(), **GREEDY)
        cache = session.cache
        with pytest.raises(UnsupportedModeError, match="cannot be cropped"):
            cache.crop(20)


@families.images_in_chunks
@pytest.mark.parametrize("options", [MIXED, {"theta": 0.76, "budget": 0.5, "window": 4}])
def test_a_prefill_in_chunks_gives_the_same(options: dict[str, Any]) -> None:
    double = matrix.model(FAMILY, torch.float64)
    inputs = families.prompt(FAMILY, images=3, text=20, dtype=torch.float64)
    whole = matrix.compressed(double, HybridKV(**options), inputs, **GREEDY)
    parts = matrix.compressed(double, HybridKV(**options), inputs, prefill_chunk_size=32, **GREEDY)
    assert torch.equal(whole.tokens, parts.tokens)
    steps = GREEDY["max_new_tokens"]
    assert largest_difference([step[:, -1:] for step in parts.logits[-steps:]], whole.logits) < 1e-9
    assert parts.session.report.retrieved > 0


def test_one_method_object_serves_many_prompts() -> None:
    method = HybridKV(**MIXED)
    first, _, _ = run(method)
    run(method, batch().inputs)
    again, _, _ = run(method)
    assert torch.equal(first, again)
