"""HybridKV against its equations, computed the slow way from what the plain model attends to."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference, recorded
from torch import Tensor

import foveakv
from foveakv.core.prompt import IMAGE, PAD, TEXT, PromptMap
from foveakv.errors import MethodError, StoreError, UnsupportedModeError
from foveakv.kernels import MOST_ROWS_CPU, cpu
from foveakv.memory.segments import Segments
from foveakv.methods import Decision, PrefillView, ReadView
from foveakv.methods.hybridkv import HybridKV, text_prior_keep

FAMILY = "qwen2_5_vl"
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
# Random weights give scores of 0.7 to 0.8; a quantile makes half of the heads static.
MIXED: dict[str, Any] = {"theta_quantile": 0.5, "budget": 0.5, "window": 6}
# "cpu" reads chunks in place, "blocks" copies them into slots of the segments; "auto" is one of the two.
BACKENDS = ["blocks", pytest.param("cpu", marks=pytest.mark.skipif(cpu.problem() is not None, reason="no CPU kernel"))]
needs_cpu = BACKENDS[1].marks[0]


@functools.cache
def model() -> Any:
    return families.build(FAMILY)


@functools.cache
def prompt() -> Any:
    return families.prompt(FAMILY, images=3, text=20)


@functools.cache
def batch() -> families.Batch:
    return families.batch(FAMILY)


@dataclass
class Spy(HybridKV):
    """Notes what the method saw: dense keys of the prefill, and each step's queries."""

    keys: list[Tensor] = field(default_factory=list, init=False)
    steps: list[tuple[int, Tensor, float]] = field(default_factory=list, init=False)

    def prefill(self, view: PrefillView) -> Decision:
        self.keys.append(view.keys)
        return super().prefill(view)

    def read(self, view: ReadView) -> Tensor:
        self.steps.append((view.layer_idx, view.query.clone(), view.scaling))
        return super().read(view)


def generated(method: HybridKV, inputs: Any = None, *, backend: str = "auto", **options: Any) -> matrix.Run:
    options = {**GREEDY, **options}
    return matrix.compressed(model(), method, inputs or prompt(), session_options={"backend": backend}, **options)


def run(method: HybridKV, inputs: Any = None, **options: Any) -> tuple[Tensor, list[Tensor], Any]:
    """Tokens, logits of every step, and the session."""
    found = generated(method, inputs, **options)
    return found.tokens, found.logits, found.session


def check_reference(method: HybridKV, inputs: Any = None, *, backend: str = "auto", **options: Any) -> Any:
    """Every step's logits are those of the plain model attending to the same positions."""
    inputs = inputs or prompt()
    found = generated(method, inputs, backend=backend, **options)
    matrix.check_against_reference(model(), found, inputs, 1e-5, **{**GREEDY, **options})
    return found.session


def attentions(inputs: Any) -> list[Tensor]:
    """[B, Hq, C, C] of every layer, from the plain model."""
    plain = families.build(FAMILY)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        return list(plain(**inputs, output_attentions=True).attentions)


def naive_score(probabilities: Tensor, kinds: Tensor, rows: str, ratio: float = 0.05) -> list[float]:
    """S of each KV head of one layer and sequence: probabilities [Hq, C, C], kinds [C]."""
    real = [c for c in range(len(kinds)) if kinds[c] != PAD]
    text = [c for c in real if kinds[c] == TEXT]
    visual = [c for c in real if kinds[c] == IMAGE]
    if rows == "after_visual" and visual:
        text = [c for c in text if c > visual[0]]
    k = math.ceil(ratio * len(real) - 1e-9)
    group = families.HEADS // families.KV_HEADS
    scores = []
    for h in range(families.KV_HEADS):
        sums = [
            sum(sorted(probabilities[h * group + g, c].tolist(), reverse=True)[:k]) for g in range(group) for c in text
        ]
        scores.append(sum(sums) / len(sums))
    return scores


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
        keep = text_prior_keep(scores, at.text, at.real, torch.tensor([[budget]]), window=2)
        assert set(keep[0, 0].nonzero()[:, 0].tolist()) == columns, budget


def test_text_prior_ignores_padding_on_either_side() -> None:
    kinds = torch.tensor([[PAD, PAD, TEXT, IMAGE, IMAGE, TEXT], [TEXT, IMAGE, IMAGE, TEXT, PAD, PAD]])
    at = PromptMap(kinds)
    scores = torch.tensor([[[9.0, 9, 0.1, 0.3, 0.2, 0]], [[0.1, 0.3, 0.2, 0, 9.0, 9]]])
    keep = text_prior_keep(scores, at.text, at.real, torch.tensor([[3], [3]]), window=1)
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


# ---- dynamic heads


def check_retrieved(method: Spy, cache: Any) -> None:
    """At every step each dynamic head attended to the chunks that a naive recomputation ranks first, and its rest."""
    kinds, heads, chunk = cache.prompt.kinds, cache.results.heads, method.chunk_size
    group, columns = families.HEADS // families.KV_HEADS, kinds.shape[1]
    steps = iter(method.steps)
    compared = 0
    for trace in cache.trace[1:]:
        for _ in range(families.LAYERS):
            layer, query, scaling = next(steps)
            keys = method.keys[layer]
            for b in range(len(kinds)):
                real = [c for c in range(columns) if kinds[b, c] != PAD]
                count = len(real) // chunk
                chunks = [real[n * chunk : (n + 1) * chunk] for n in range(count)]
                rest = real[count * chunk :]
                for h in range(families.KV_HEADS):
                    if heads.static[b, layer, h]:
                        continue
                    slots = (int(heads.budgets[b, layer, h]) - len(rest)) // chunk
                    assert slots > 0, "the test should retrieve"
                    digests = torch.stack([keys[b, h, c].mean(0) for c in chunks])
                    wanted = torch.zeros(count)
                    for g in range(group):
                        for t in range(query.shape[2]):
                            probability = (digests @ query[b, h * group + g, t] * scaling).softmax(-1)
                            wanted = torch.maximum(wanted, probability)
                    best = wanted.topk(min(slots, count)).indices.tolist()
                    expected = {c for n in best for c in chunks[n]} | set(rest)
                    got = trace[layer][b, h]
                    assert {p for p in got.tolist() if 0 <= p < columns} == expected
                    assert -1 not in got[: int((got >= 0).sum())], "a blank slot was attended to"
                    compared += 1
    assert compared > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inputs", ["one", "padded"])
@pytest.mark.parametrize(
    "options",
    [
        {"classify": "all_dynamic", "budget": 0.5, "window": 4, "chunk_size": 4},
        {"theta_quantile": 0.5, "budget": 0.6, "window": 4, "chunk_size": 4},
        {"theta": 0.76, "budget": 0.6, "window": 4, "chunk_size": 4},
        {"classify": "all_dynamic", "budget": 0.5, "window": 4, "chunk_size": 3},
    ],
)
def test_dynamic_heads_retrieve_the_best_chunks(options: dict[str, Any], inputs: str, backend: str) -> None:
    method = Spy(**options)
    _, _, session = run(method, prompt() if inputs == "one" else batch().inputs, backend=backend)
    check_retrieved(method, session.cache)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_turn_retrieves_for_all_its_tokens(backend: str) -> None:
    method = Spy(classify="all_dynamic", budget=0.5, window=4)
    fresh = families.build(FAMILY)
    turn = families.first_turn(FAMILY, [families.row(FAMILY, images=3, text=20)])
    cache = foveakv.cache_for(fresh, method, trace=True, backend=backend)
    first = fresh.generate(**turn.inputs, past_key_values=cache, **GREEDY)
    later = families.next_turn(FAMILY, fresh, turn, first)
    fresh.generate(**later.inputs, past_key_values=cache, **GREEDY)
    assert max(query.shape[2] for _, query, _ in method.steps) > 1
    check_retrieved(method, cache)


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


# ---- chunks that are read in place


@needs_cpu
@pytest.mark.parametrize("store", ["host", "device", "disk"])
@pytest.mark.parametrize("inputs", ["one", "padded"])
def test_in_place_is_what_copies_give(inputs: str, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompt() if inputs == "one" else batch().inputs
    options = {**MIXED, "chunk_size": 4, "store": store}
    copied = generated(HybridKV(**options), given, backend="blocks")
    with monkeypatch.context() as patched:
        patched.setattr(Segments, "write", None)  # nothing may be copied
        read = generated(HybridKV(**options), given, backend="cpu", follow=copied)
    assert largest_difference(copied.logits, read.logits) < 1e-5
    matrix.check_choices(read, 1e-5)
    for before, after in zip(copied.trace[1:], read.trace[1:], strict=True):
        assert all(torch.equal(before[layer], after[layer]) for layer in before)
    one, two = copied.session.report, read.session.report
    for name in ("retrieved", "hit_rate", "evicted", "stored_slots", "full_slots"):
        assert getattr(one, name) == getattr(two, name), name
    assert one.retrieved > 0
    assert all(torch.equal(copied.cache.kept(n), read.cache.kept(n)) for n in range(families.LAYERS))
    slots = read.cache.results.heads.slots
    for layer in read.cache.compressed:
        store = layer.store
        assert bool((store.chosen_slots > 0).any())
        own = layer.segments.lengths - (GREEDY["max_new_tokens"] - 1)
        assert torch.equal(own, slots[:, layer.compressed_idx] - store.chosen_slots), "slots were reserved"


@needs_cpu
def test_in_place_with_many_query_rows() -> None:
    """A long second turn: more rows than the CPU kernel is for."""
    found = []
    for backend in ("blocks", "auto", "cpu"):
        cache = foveakv.cache_for(model(), HybridKV(**MIXED), backend=backend)
        later = torch.randint(10, 40, (1, 30), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model()(**prompt(), past_key_values=cache)
            found.append(model()(input_ids=later, past_key_values=cache).logits)
        assert cache.compressed[0].counts.retrieved > 0
    assert families.HEADS // families.KV_HEADS * 30 > MOST_ROWS_CPU
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-5)


@needs_cpu
def test_in_place_under_a_mask_that_hides_chunks() -> None:
    found, inputs = [], prompt()
    for backend in ("blocks", "auto", "cpu"):
        cache = foveakv.cache_for(model(), HybridKV(**MIXED), backend=backend)
        columns = inputs["input_ids"].shape[1]
        mask = torch.ones(1, 1, 1, columns + 1, dtype=torch.bool)
        mask[..., columns // 4 : columns // 2] = False
        with torch.no_grad():
            model()(**inputs, past_key_values=cache)
            step = {"input_ids": torch.tensor([[11]]), "position_ids": torch.full((3, 1, 1), columns)}
            found.append(model()(**step, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-5)


@needs_cpu
def test_a_copied_cache_reads_the_same_chunks() -> None:
    cache = foveakv.cache_for(model(), HybridKV(**MIXED), backend="cpu")
    with torch.no_grad():
        model()(**prompt(), past_key_values=cache)
        model()(input_ids=torch.tensor([[11]]), past_key_values=cache)
        other = copy.deepcopy(cache)
        assert other.compressed[0].store.stored is cache.compressed[0].store.stored
        model()(input_ids=torch.tensor([[30]]), past_key_values=other)
        one, two = (model()(input_ids=torch.tensor([[12]]), past_key_values=c).logits for c in (cache, other))
    assert cache.seen == other.seen - 1
    assert not torch.equal(one, two)


def test_double_precision_copies_chunks() -> None:
    double = families.build(FAMILY, dtype=torch.float64)
    inputs = families.prompt(FAMILY, images=2, dtype=torch.float64)
    with foveakv.compress(double, HybridKV(**MIXED)) as session:
        double.generate(**inputs, **GREEDY)
    assert session.report.retrieved > 0
    assert not any(layer.store.in_place for layer in session.cache.compressed if layer.store is not None)


# ---- budgets and accounting


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.35, 0.8, 1.0, 3, 40, "4KB", "64KiB"])
@pytest.mark.parametrize(
    "options",
    [{}, {"theta_quantile": 0.4}, {"theta_quantile": 0.4, "rounding": "nearest"}, {"classify": "all_dynamic"},
     {"theta_quantile": 0.4, "spend_rest": True},
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
    left, spent = (
        run(HybridKV(budget=0.35, theta_quantile=0.4, window=4, spend_rest=spend), prompt(), max_new_tokens=2)[2]
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
    _, _, session = run(HybridKV(budget=0.1, classify="all_dynamic", window=8), inputs)
    report = session.report
    heads = families.LAYERS * families.KV_HEADS
    assert report.details["digest_bytes"] == heads * (session.cache.prompt_columns // 8) * 16 * 4
    # What is read in place counts where a copy would have been.
    in_place = sum(int(layer.store.chosen_slots.sum()) for layer in session.cache.compressed)
    assert report.host_bytes == (heads * (session.cache.prompt_columns // 8 * 8) - in_place) * 32 * 4
    assert report.stored_bytes < 0.4 * report.full_bytes
    # Layers shrink one after the other, so even the peak stays below the whole.
    assert report.peak_bytes < 0.75 * report.full_bytes


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
        ({"rounding": "up"}, "rounding must be one of 'down' or 'nearest'"),
        ({"store_dir": "/tmp"}, 'store="disk" only'),
        ({"digest_dtype": "int4"}, "digest_dtype must be one of 'model', 'bf16' or 'int8'"),
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


@pytest.mark.parametrize("digest_dtype", ["model", "bf16", "int8"])
@pytest.mark.parametrize("classify", ["auto", "all_dynamic", "all_static"])
def test_digests_are_paid_from_the_budget(classify: str, digest_dtype: str) -> None:
    """Slots and digests together fit the budget; without `count_digests` the digests come on top."""
    used = {}
    for counted in (True, False):
        options = {**MIXED, "classify": classify, "budget": 0.5, "min_budget": 4, "count_digests": counted}
        _, _, session = run(HybridKV(**options, digest_dtype=digest_dtype), prompt(), max_new_tokens=1)
        cache = session.cache
        heads, context = cache.geometry.heads, int(cache.geometry.contexts[0])
        digests = cache.results.figures["digest_bytes"] / (2 * 16 * 4)  # in slots
        used[counted] = int(cache.results.heads.slots.sum()) + digests
        assert int(cache.state.total) <= 0.5 * context * heads
    assert used[True] <= 0.5 * context * heads
    assert used[True] <= used[False]


def test_presets() -> None:
    paper, small = HybridKV.preset("paper", budget=0.2), HybridKV.preset("small")
    assert (paper.theta, paper.rho, paper.rounding, paper.count_digests, paper.budget) == (
        0.9,
        0.75,
        "nearest",
        False,
        0.2,
    )
    assert (small.theta_quantile, small.window, small.chunk_size, small.digest_dtype) == (0.7, 8, 4, "int8")
    with pytest.raises(MethodError, match="paper, small"):
        HybridKV.preset("large")
