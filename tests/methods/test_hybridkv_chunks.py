"""HybridKV's dynamic heads: which chunks they fetch, and chunks that are read in place."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import families
import matrix
import pytest
import torch
from hybridkv_runs import BACKENDS, FAMILY, GREEDY, MIXED, batch, generated, model, needs_cpu, prompt, run
from masked_reference import largest_difference
from torch import Tensor

import foveakv
from foveakv.core.prompt import PAD
from foveakv.kernels import MOST_ROWS_CPU
from foveakv.memory.segments import Segments
from foveakv.methods import Decision, PrefillView, ReadView
from foveakv.methods.hybridkv import HybridKV


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
    method = Spy(digest_dtype="model", **options)
    _, _, session = run(method, prompt() if inputs == "one" else batch().inputs, backend=backend)
    check_retrieved(method, session.cache)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_turn_retrieves_for_all_its_tokens(backend: str) -> None:
    method = Spy(classify="all_dynamic", budget=0.5, window=4, chunk_size=8, digest_dtype="model")
    fresh = families.build(FAMILY)
    turn = families.first_turn(FAMILY, [families.row(FAMILY, images=3, text=20)])
    cache = foveakv.cache_for(fresh, method, trace=True, backend=backend, turns="store")
    first = fresh.generate(**turn.inputs, past_key_values=cache, **GREEDY)
    later = families.next_turn(FAMILY, fresh, turn, first)
    fresh.generate(**later.inputs, past_key_values=cache, **GREEDY)
    assert max(query.shape[2] for _, query, _ in method.steps) > 1
    check_retrieved(method, cache)


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
