"""Whole models with `kv_dtype`: exactly the plain model with its stored keys and values rounded to quantized levels."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import families
import matrix
import pytest
import second_passes
import torch
from masked_reference import largest_difference, masked, recorded
from quantized_reference import KINDS, TOLERANCE, check, coded, compressed
from torch import Tensor

import foveakv
from foveakv.memory.segments import Segments

pytestmark = pytest.mark.usefixtures("no_gradients")


FAMILIES = ["qwen2_5_vl", "llava", "gemma3"]
# These evict or retrieve after a layer has stored its prompt, so the trace does not say which prompt tokens had
# full-precision copies.
DROPS_LATER = [
    name
    for name in matrix.METHODS
    if name in ("hae", "mustdrop", "hybridkv", "quest") or "after_prefill" in matrix.method(name).decides
]


# ----------------------------------------------------------------------------------------------------------- exactness


ALL = list(itertools.product(FAMILIES, matrix.METHODS, KINDS))


@pytest.mark.parametrize(("family", "name", "kind"), ALL)
def test_every_method_attends_to_decoded_slots(family: str, name: str, kind: str) -> None:
    """A padded batch, in fp64, so that no number lies so near to a rounding edge that the two could disagree."""
    if second_passes.refused(family, name):
        pytest.skip("refused, see test_families.py")
    model, inputs = matrix.model(family, torch.float64), families.batch(family, dtype=torch.float64).inputs
    run = compressed(model, matrix.method(name), inputs, kind, 0)
    check(model, run, inputs, kind, 0)
    matrix.check_storage(run)
    plain = matrix.replayed(model, run, inputs)
    assert largest_difference(run.logits, plain.logits) > 10 * TOLERANCE, "quantization made no difference"


@pytest.mark.parametrize("window", [4, 32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in matrix.METHODS if name not in DROPS_LATER])
def test_the_newest_tokens_are_exact(name: str, kind: str, window: int) -> None:
    family = "qwen2_5_vl"
    model, inputs = matrix.model(family, torch.float64), families.batch(family, dtype=torch.float64).inputs
    run = compressed(model, matrix.method(name), inputs, kind, window)
    check(model, run, inputs, kind, window)
    matrix.check_storage(run)


@pytest.mark.parametrize("classify", ["all_static", "all_dynamic"])
@pytest.mark.parametrize("kind", KINDS)
def test_fetched_chunks_are_quantized(kind: str, classify: str) -> None:
    """Chunks are stored as the model made them; in their slots they are quantized."""
    family = "llava"
    model, inputs = matrix.model(family, torch.float64), families.batch(family, dtype=torch.float64).inputs
    run = compressed(model, matrix.method("hybridkv", classify=classify, budget=0.6), inputs, kind, 0)
    check(model, run, inputs, kind, 0)
    assert (run.session.report.retrieved > 0) == (classify == "all_dynamic")
    if classify == "all_dynamic":
        for layer in run.cache.compressed:
            assert layer.segments.quantizer is not None
            assert layer.store.stored.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["snapkv", "hae", "h2o", "adakv"])
def test_beams(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reordered beams carry their bytes along: nothing is encoded again."""
    family = "qwen2_5_vl"
    model, inputs = matrix.model(family, torch.float64), families.batch(family, dtype=torch.float64).inputs
    moved = []
    original = Segments.select_sequences

    def select(self: Segments, index: Tensor) -> None:
        before = bits(self)
        original(self, index)
        wanted = [part for i in index.tolist() for part in before[i * self.heads : (i + 1) * self.heads]]
        same = [all(map(torch.equal, a, b)) for a, b in zip(bits(self), wanted, strict=True)]
        moved.append(index.tolist() != list(range(len(index))))
        assert all(same)

    monkeypatch.setattr(Segments, "select_sequences", select)
    run = compressed(model, matrix.method(name), inputs, kind, 2, num_beams=3)
    assert any(moved)
    check(model, run, inputs, kind, 2, num_beams=3)
    matrix.check_storage(run)


def bits(segments: Segments) -> list[tuple[Tensor, ...]]:
    """For every run: quantized rows, residual window, scales."""
    runs, found = segments.runs, []
    for run, (start, length) in enumerate(zip(runs.start.tolist(), runs.length.tolist(), strict=True)):
        rows = slice(start, start + length)
        parts = [runs.keys[rows], runs.values[rows], runs.quantizer.key_scale[run], runs.quantizer.key_zero[run]]
        if runs.residual is not None:
            parts += [runs.residual.slot_entry[rows], runs.residual.keys[run], runs.residual.values[run]]
        found.append(tuple(part.clone() for part in parts))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["full", "snapkv", "h2o", "hae"])
def test_a_row_of_a_batch_is_as_alone(name: str, kind: str) -> None:
    batch = families.batch("qwen2_5_vl", dtype=torch.float64)
    model = matrix.model("qwen2_5_vl", torch.float64)
    together = compressed(model, matrix.method(name), batch.inputs, kind, 4)
    for i, single in enumerate(batch.singles):
        said = torch.cat([single["input_ids"], together.tokens[i : i + 1, -6:]], 1)
        alone = compressed(model, matrix.method(name), single, kind, 4, follow=said)
        for a, b in zip(alone.logits, together.logits, strict=True):
            assert (a[0, -1] - b[i, -1]).abs().max() < TOLERANCE
        matrix.check_choices(alone, TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["snapkv", "hae", "h2o", "hybridkv"])
def test_second_turn(name: str, kind: str) -> None:
    """New words with a new image, several tokens in one pass; padding between the turns of the shorter row."""
    family, window = "llava", 0 if name in DROPS_LATER else 9
    model = matrix.model(family, torch.float64)
    rows = [families.row(family, images=2), families.row(family, images=1, seed=1)]
    first = families.first_turn(family, rows, torch.float64)

    def talk(said: tuple[matrix.Run | None, ...] = (None, None)) -> tuple[matrix.Run, ...]:
        one = matrix.plain(model, first.inputs, follow=said[0])
        second = families.next_turn(family, model, first, one.tokens, image=True)
        return one, matrix.plain(model, second.inputs, follow=said[1], past_key_values=one.cache)

    method = matrix.method(name)
    # Chunks of a further block are quantized twice: in the slots that they come from, and where they are fetched to.
    turns: Any = "store" if name == "hybridkv" else None
    with (
        foveakv.compress(model, method, trace=True, kv_dtype=kind, residual_length=window, turns=turns) as session,
        recorded(model) as got,
    ):
        said = talk()
    with coded(kind, window, first.inputs), masked(model, list(session.trace)), recorded(model) as want:
        again = talk(said)
    assert largest_difference(got, want) < TOLERANCE
    for run in again:
        matrix.check_choices(run, TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["blocks", "cpu"])
@pytest.mark.parametrize("name", ["snapkv", "adakv", "h2o", "hae", "hybridkv"])
def test_backends_agree(name: str, backend: str, kind: str) -> None:
    """In float32 and bfloat16; new tokens stay exact for these few steps, so that rounding cannot part the runs.

    What a method drops or fetches while decoding depends on scores that the backends round differently, so the runs are
    compared up to the first step in which they attend to different tokens. The first decoded step is always compared.
    """
    if backend == "cpu" and foveakv.kernels.problem("cpu"):
        pytest.skip("the CPU kernel cannot be built here")
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.03)):
        model = matrix.model("qwen2_5_vl", dtype)
        inputs = families.batch("qwen2_5_vl", dtype=dtype).inputs
        method = matrix.method(name)
        want = compressed(model, method, inputs, kind, 8, backend="reference")
        got = compressed(model, method, inputs, kind, 8, backend=backend, follow=want)
        steps = next((i for i, pair in enumerate(zip(got.trace, want.trace, strict=True)) if differ(*pair)), None)
        assert steps is None or (steps > 1 and name in ("h2o", "hae", "hybridkv"))
        if dtype == torch.float32:
            assert largest_difference(got.logits[:steps], want.logits[:steps]) < tolerance
            if steps is None:
                matrix.check_choices(got, tolerance)
        else:
            largest = max(step.abs().max().item() for step in want.logits[1:steps])
            assert largest_difference(got.logits[1:steps], want.logits[1:steps], every_row=True) < tolerance * largest


def differ(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    """Whether two steps of traces attend to different positions in some layer."""
    return one.keys() != other.keys() or not all(
        torch.equal(a.sort().values, other[layer].sort().values) for layer, a in one.items()
    )


# ----------------------------------------------------------------------------------------------- copies, crops, chunks


def test_a_copied_cache_goes_its_own_way() -> None:
    model, inputs = matrix.model("qwen2_5_vl"), families.prompt("qwen2_5_vl")
    cache = foveakv.cache_for(model, matrix.method("snapkv"), kv_dtype="int8", residual_length=3)
    output = model.generate(**inputs, **matrix.GREEDY, past_key_values=cache)
    twin = copy.deepcopy(cache)
    before = [bits(layer.segments) for layer in twin.compressed]
    ids = torch.cat([output.sequences, torch.tensor([[31, 32]])], 1)
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | families.token_types("qwen2_5_vl", ids)
    want = model.generate(**more, **matrix.GREEDY, past_key_values=cache).sequences
    for layer, runs in zip(twin.compressed, before, strict=True):
        assert all(torch.equal(a, b) for new, old in zip(bits(layer.segments), runs, strict=True)
                   for a, b in zip(new, old, strict=True))  # fmt: skip
    assert torch.equal(model.generate(**more, **matrix.GREEDY, past_key_values=twin).sequences, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_chunks(kind: str) -> None:
    """Ranges are those of the whole prompt, not of its last chunk."""
    model, inputs = matrix.model("llama", torch.float64), families.batch("llama", dtype=torch.float64).inputs
    run = compressed(model, matrix.method("snapkv"), inputs, kind, 3, prefill_chunk_size=16)
    check(model, run, inputs, kind, 3, prefill_chunk_size=16)


def test_the_oldest_decoded_tokens_go_first() -> None:
    model, inputs = matrix.model("llama"), families.prompt("llama")
    with foveakv.compress(
        model, matrix.method("snapkv"), kv_dtype="int8", residual_length=2, max_decode_slots=4, trace=True
    ) as session:
        model.generate(**inputs, **{**matrix.GREEDY, "max_new_tokens": 12})
    columns = inputs["input_ids"].shape[1]
    for layer in session.cache.compressed:
        positions, entries = layer.segments.positions(), layer.segments.field("residual")
        assert int((positions >= columns).sum(-1).max()) <= 4
        assert torch.equal(entries >= 0, positions >= columns + 9)


@pytest.mark.parametrize("window", [0, 4, 32])
def test_cropped_drafts_leave_nothing_behind(window: int) -> None:
    """Tokens that were taken back and given again are the same bytes in the same window."""
    model, inputs = matrix.model("llama"), families.prompt("llama")
    caches = [
        foveakv.cache_for(model, matrix.method("snapkv"), kv_dtype="int8", residual_length=window, turns="store")
        for _ in range(2)
    ]
    new = torch.tensor([[31, 32, 33, 34, 35]])
    given = torch.ones_like(inputs["input_ids"])
    argument = matrix.cache_argument("llama")
    for cache, drafts in zip(caches, (3, 0), strict=True):
        model(**inputs, **{argument: cache})
        model(input_ids=new[:, :2], attention_mask=torch.ones(1, given.shape[1] + 2), **{argument: cache})
        if drafts:
            wrong = torch.tensor([[91, 92, 93]])
            model(input_ids=wrong, attention_mask=torch.ones(1, given.shape[1] + 5), **{argument: cache})
            cache.crop(given.shape[1] + 2)
        last = model(input_ids=new[:, 2:], attention_mask=torch.ones(1, given.shape[1] + 5), **{argument: cache})
        assert torch.isfinite(last.logits).all()
    for layers in zip(*(cache.compressed for cache in caches), strict=True):
        one, two = (layer.segments for layer in layers)
        assert torch.equal(one.positions(), two.positions())
        assert all(map(torch.equal, one.gather(), two.gather()))
        assert all(map(torch.equal, bits(one)[0][:2], bits(two)[0][:2]))
        if window:
            assert torch.equal(one.field("residual"), two.field("residual"))
            assert int((one.field("residual") >= 0).sum()) == min(window, one.max_length) * one.heads


# ------------------------------------------------------------------------------------------------------------- quality


def test_most_tokens_are_those_of_the_plain_model() -> None:
    """Random weights have many near ties; int8 still chooses as without codes almost everywhere, word after word."""
    equal: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for family, name in itertools.product(FAMILIES, ["full", "snapkv", "h2o"]):
        model, inputs = matrix.model(family, torch.float64), families.batch(family, dtype=torch.float64).inputs
        want = matrix.compressed(model, matrix.method(name), inputs)
        for kind in KINDS:
            got = compressed(model, matrix.method(name), inputs, kind, 0, follow=want)
            assert got.choices is not None
            chosen = torch.stack([scores.argmax(-1) for scores in got.choices.scores], 1)
            equal[kind].append((chosen == want.tokens[:, -6:]).double().mean().item())
    shares = {kind: sum(found) / len(found) for kind, found in equal.items()}
    print(f"tokens equal to those without a kv_dtype: {shares}")
    assert shares["int8"] >= 0.85
    assert shares["int8"] >= shares["int4"]
