"""LOOK-M by hand: what stays, the three merges in fp64, and that nothing but the cache changes."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from torch import Tensor

from foveakv.methods.lookm import LookM, merged
from foveakv.methods.text_first import text_first

FAMILY = "llava"


@pytest.fixture(scope="module")
def setting() -> tuple[Any, dict[str, Any], Tensor, Any]:
    """A model, a prompt, every layer's attention per KV head and column [L, H, C], and the plain cache."""
    model = families.build(FAMILY, dtype=torch.float64)
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")  # eager attention rounds its softmax to float32
        cache = matrix.cache_of(model(**inputs, use_cache=True))
    layers = [weights[0].unflatten(0, (families.KV_HEADS, -1)).sum((1, 2)) for weights in attentions]
    return model, inputs, torch.stack(layers), cache


def merge_by_hand(states: Tensor, keys: Tensor, kept: list[int], how: str) -> Tensor:
    """One head's states [C, D] of the kept columns, by the formulas and one token after the other."""
    taken: dict[int, list[Tensor]] = {c: [states[c]] for c in kept}
    for e in range(len(keys)):
        if e in taken:
            continue
        cosine = {c: float(keys[e] @ keys[c] / (keys[e].norm() * keys[c].norm())) for c in kept}
        c = max(kept, key=lambda c: cosine[c])
        share = {"mean": states[e], "pivot": (states[e] + states[c]) / 2, "weighted": cosine[c] * states[e]}
        taken[c].append(share[how])
    return torch.stack([torch.stack(taken[c]).sum(0) / len(taken[c]) for c in kept])


@pytest.mark.parametrize("how", ["pivot", "mean", "weighted"])
def test_by_hand(setting: tuple[Any, dict[str, Any], Tensor, Any], how: str) -> None:
    model, inputs, scores, plain = setting
    ids = inputs["input_ids"][0].tolist()
    columns, visual = len(ids), [c for c, token in enumerate(ids) if token == families.IMAGE]
    size, recent = len(ids) - len(visual) + 3, 6  # all text, and three visual tokens more at the most
    method = LookM(budget=size, recent_ratio=recent / size, merge=how)
    run = matrix.compressed(model, method, inputs, max_new_tokens=1)
    for number in range(len(scores)):
        layer = run.cache.compressed[number]
        keys, values = layer.segments.gather()
        for head in range(families.KV_HEADS):
            newest = list(range(columns - recent, columns))
            text = [c for c in range(columns - recent) if c not in visual]
            order = sorted(visual, key=lambda c: (-float(scores[number, head, c]), c))
            order = [c for c in order if c not in newest]
            kept = sorted(newest + text + order[: size - recent - len(text)])
            assert len(kept) == size
            assert run.cache.kept(number)[0, head].tolist() == kept
            own = plain.layers[number]
            for stored, states in ((keys, own.keys), (values, own.values)):
                want = merge_by_hand(states[0, head], own.keys[0, head], kept, how)
                assert torch.allclose(stored[0, head], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["pivot", "mean", "weighted"])
def test_decoding_reads_what_was_merged(setting: tuple[Any, dict[str, Any], Tensor, Any], how: str) -> None:
    """The plain model on a plain cache that holds the merged keys and values says the same."""
    model, inputs, _, _ = setting
    run = matrix.compressed(model, LookM(budget=0.4, merge=how), inputs, max_new_tokens=3)
    columns = inputs["input_ids"].shape[1]
    plain = matrix.plain(model, inputs, max_new_tokens=3)
    assert torch.equal(run.logits[0][:, -1], plain.logits[0][:, -1]), "merging touched what the prompt's pass reads"
    with torch.no_grad():
        start = matrix.cache_of(model(**inputs, use_cache=True))
        for number, layer in enumerate(start.layers):
            keys, values = run.cache.compressed[number].segments.gather()
            size = keys.shape[2] - 2  # two tokens were decoded on top
            layer.keys, layer.values = keys[:, :, :size].clone(), values[:, :, :size].clone()
        for step in (1, 2):
            at = columns + step - 1
            output = model(
                input_ids=run.tokens[:, at : at + 1], position_ids=torch.tensor([[at]]), cache_position=None,
                **{matrix.cache_argument(FAMILY): start},
            )  # fmt: skip
            assert (output.logits[:, -1] - run.logits[step][:, -1]).abs().max() < 1e-9
    assert (run.logits[1] - plain.logits[1]).abs().max() > 1e-6


def test_merges_on_numbers() -> None:
    """Two kept tokens at right angles; the evicted ones lie next to the one or the other."""
    keys = torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, -4.0], [5.0, 12.0], [9.0, 9.0]])[None, None]
    values = torch.tensor([[1.0], [4.0], [10.0], [7.0], [1.0], [100.0]])[None, None]
    keep = torch.tensor([True, False, True, False, False, False])[None, None]
    real = torch.tensor([[True, True, True, True, True, False]])
    before = keys.clone(), values.clone()
    # 1 -> 0 (cosine 1); 3 -> 0 (cosine 0 beats -1); 4 -> 2 (12/13 beats 5/13); 5 is padding
    want = {
        "mean": ([[(2 + 3 + 0) / 3, -4 / 3], [5 / 2, 13 / 2]], [(1 + 4 + 7) / 3, (10 + 1) / 2]),
        "pivot": ([[(2 + 2.5 + 1) / 3, -2 / 3], [2.5 / 2, 7.5 / 2]], [(1 + 2.5 + 4) / 3, (10 + 5.5) / 2]),
        "weighted": ([[(2 + 3) / 3, 0], [60 / 13 / 2, (1 + 144 / 13) / 2]], [(1 + 4) / 3, (10 + 12 / 13) / 2]),
    }
    for how, (k, v) in want.items():
        got_keys, got_values = merged(keys, values, keep, real, how)
        assert torch.allclose(got_keys[keep], torch.tensor(k))
        assert torch.allclose(got_values[keep][:, 0], torch.tensor(v))
        assert torch.equal(got_keys[~keep], keys[~keep])
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_single(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 40, 8).to(dtype).unbind()
    keep = torch.zeros(1, 2, 40, dtype=torch.bool)
    keep[..., ::7] = True
    real = torch.ones(1, 40, dtype=torch.bool)
    for how in ("pivot", "mean", "weighted"):
        got = merged(keys, values, keep, real, how)
        want = merged(keys.double(), values.double(), keep, real, how)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == dtype
            assert torch.allclose(one.double(), other, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_text_first() -> None:
    scores = torch.tensor([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 0.0, 5.0])[None, None]
    text = torch.tensor([False, True, False, True, False, True, False, True])[None]
    real = torch.ones_like(text)

    def kept(size: int, recent: int, share: float = 0.0) -> list[int]:
        keep = text_first(scores, text, real, torch.tensor([[size]]), torch.tensor([[recent]]), share)
        return keep[0, 0].nonzero()[:, 0].tolist()

    assert kept(4, 2) == [3, 5, 6, 7]  # the window, then the best text
    assert kept(5, 2) == [1, 3, 5, 6, 7]
    assert kept(6, 2) == [0, 1, 3, 5, 6, 7]  # text is in, then visual tokens
    assert kept(8, 2) == list(range(8))
    assert kept(1, 1) == [7]
    assert kept(4, 2, 0.5) == [0, 5, 6, 7]  # half of the two besides the window
    assert kept(5, 2, 0.5) == [0, 3, 5, 6, 7]  # rounded down
    assert kept(5, 2, 1.0) == [0, 2, 4, 6, 7]
    assert kept(8, 2, 1.0) == list(range(8))


@pytest.mark.parametrize("how", ["pivot", "mean", "weighted"])
def test_beams_and_chunks(how: str) -> None:
    """A text prompt in chunks merges the same; beams carry merged numbers along."""
    model, inputs = matrix.model("llama", torch.float64), families.batch("llama", dtype=torch.float64).inputs
    whole = matrix.compressed(model, LookM(budget=0.4, merge=how), inputs)
    chunked = matrix.compressed(model, LookM(budget=0.4, merge=how), inputs, prefill_chunk_size=7)
    assert torch.equal(whole.tokens, chunked.tokens)
    for one, other in zip(whole.cache.compressed, chunked.cache.compressed, strict=True):
        for a, b in zip(one.segments.gather(), other.segments.gather(), strict=True):
            assert torch.allclose(a, b, atol=1e-9)
    beams = matrix.compressed(model, LookM(budget=0.4, merge=how), inputs, num_beams=3)
    columns = whole.cache.prompt_columns
    for one, other in zip(whole.cache.compressed, beams.cache.compressed, strict=True):
        layer = one.layer_idx
        alone, held = whole.cache.kept(layer), beams.cache.kept(layer)
        for row in range(len(held)):
            for head in range(held.shape[1]):
                mine, theirs = held[row, head], alone[row // 3, head]
                mine, theirs = ((at >= 0) & (at < columns) for at in (mine, theirs))
                for a, b in zip(other.segments.gather(), one.segments.gather(), strict=True):
                    assert torch.allclose(a[row, head, : len(mine)][mine], b[row // 3, head, : len(theirs)][theirs])


def test_the_second_copy_counts_in_the_peak(setting: tuple[Any, dict[str, Any], Tensor, Any]) -> None:
    model, inputs, _, plain = setting
    merged, dropped = (
        matrix.compressed(model, LookM(budget=0.3, merge=how), inputs, max_new_tokens=1).session.report.peak_bytes
        for how in ("pivot", "none")
    )
    assert merged - dropped == plain.layers[0].keys.nbytes + plain.layers[0].values.nbytes


@pytest.mark.parametrize("budget", [0.03, 0.1, 0.37, 0.8, 1.0, 3])
def test_the_budget_is_true(budget: Any) -> None:
    model, batch = matrix.model(FAMILY, torch.float64), families.batch(FAMILY, dtype=torch.float64)
    run = matrix.compressed(model, LookM(budget=budget), batch.inputs, max_new_tokens=1)
    geometry = run.cache.geometry
    for b, context in enumerate(geometry.contexts):
        slots = sum(int((held[b] >= 0).sum()) for held in matrix.positions_held(run))
        most = budget * context * geometry.heads if isinstance(budget, float) else budget * geometry.heads
        assert slots <= max(most, geometry.heads)
        assert slots > most - geometry.heads
