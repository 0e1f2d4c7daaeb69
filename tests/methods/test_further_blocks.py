"""What methods decide about further blocks, on plain views: later turns, chunks of a prompt, groups of frames."""

from __future__ import annotations

import dataclasses
from typing import Any

import matrix
import pytest
import torch
from plain_blocks import DIM, GROUP, HEADS, LAYERS, SCALING, Context, attention, kinds_of
from plain_slots import PlainSlots
from plain_views import attention_sum
from torch import Tensor

from foveakv import methods
from foveakv.core.budget import Geometry
from foveakv.methods import Decision, DecodeView, Method, ModelFacts, PrefillView, PromptEndView, PromptView

FIRST = "ttiiiiiiiitttiiiiiiiiiitttttttttttttttt", ".....ttiiiiiiiiiiiiiitttttiiiiittttttttt"
TURN = "tttiiiiiiiiiiiittttttttttt", "...tiiiiiiiiiiiiiiiiiitttt"
LAST = "ttttttttttttt", "tttttttttt..."
BLOCKS = [len(part[1]) for part in (FIRST, TURN, LAST)]
FIRST = FIRST[0] + "t" * (len(FIRST[1]) - len(FIRST[0])), FIRST[1]

OPTIONS: dict[str, dict[str, Any]] = {"hae": {"score_layer": 1}, "mustdrop": {"layers": "1,2"}}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in methods.available()),
    ("snapkv", {"kernel": 5}),
    ("adakv", {"kernel": 5}),
    ("lookm", {"merge": "none"}),
    ("lookm", {"visual_share": 0.5}),
    ("h2o", {"per_head_scores": False, "prefill_rows": 8}),
    ("hae", {"scores": "shared"}),
    ("hae", {"scores": "shared", "score_layer": "0,2"}),
    ("hae", {"per_head_scores": True, "candidates": "prompt"}),
    ("hae", {"early_layers": "own", "prompt_ranking": "own", "score": "frequency+importance"}),
    ("hae", {"early_layers": "first", "rows": "sum"}),
    ("hae", {"ddes": False}),
    ("hae", {"ddes": False, "target_visual_tokens": 0.4, "r": None}),
    ("hae", {"dap": False}),
    ("hae", {"budget": None}),
    ("hae", {"compress_prompt": False}),
    ("mustdrop", {"decode_stage": False}),
    ("mustdrop", {"target_visual_tokens": None, "r": 0.02, "alpha": 0.5}),
    ("hybridkv", {"theta": "auto"}),
    ("hybridkv", {"classify": "all_static"}),
    ("hybridkv", {"classify": "all_dynamic"}),
    ("hybridkv", {"budget": 0.15}),
]


def made(name: str, options: dict[str, Any]) -> Method:
    return matrix.method(name, **{**OPTIONS.get(name, {}), **options})


def context(noise: float = 0.0, seed: int = 0) -> Context:
    rows = (a + b + c for a, b, c in zip(FIRST, TURN, LAST, strict=True))
    return Context(kinds_of(*rows), noise, seed)


def read(method: Method, noise: float = 0.0, blocks: list[int] | None = None) -> Context:
    found = context(noise)
    for tokens in BLOCKS if blocks is None else blocks:
        found.read(method, tokens)
    return found


CASES = [
    pytest.param(name, options, id="-".join([name, *(f"{k}={v}" for k, v in options.items())]))
    for name, options in VARIANTS
    if made(name, options).further == "context"
]
cases = pytest.mark.parametrize(("name", "options"), CASES)


def test_every_method_says_what_it_does() -> None:
    others = {name: made(name, {}).further for name in methods.available() if made(name, {}).further != "context"}
    assert others == {"full": "keep", "kvzip": "keep", "quest": "keep", "tgvkv": "block"}


@cases
@pytest.mark.parametrize("blocks", [BLOCKS, [40, 1, 1, 7, 17, 13], [7] * 11], ids=["turns", "steps", "chunks"])
def test_only_what_a_head_stores_is_kept(name: str, options: dict[str, Any], blocks: list[int]) -> None:
    method = made(name, options)  # the context's own checks
    found = read(method, blocks=blocks)
    for idx, stored in enumerate(found.stored):
        real = found.prompt.real[:, None, : found.seen]
        assert not (stored[..., : found.seen] & ~real).any()
        assert stored.any(-1).all() or found.offloaded[idx].any()
    declared = method.granularity
    if declared != "head":
        assert all((stored == stored[:, :1]).all() for stored in found.stored)
    if declared == "token":
        assert all(torch.equal(stored, found.stored[0]) for stored in found.stored)


@cases
def test_holes_do_not_matter(name: str, options: dict[str, Any]) -> None:
    zeros, noise = (read(made(name, options), noise) for noise in (0.0, 50.0))
    assert all(map(torch.equal, zeros.stored, noise.stored))
    assert all(map(torch.equal, zeros.chunks, noise.chunks))
    for first, second, stored in zip(zeros.fields, noise.fields, zeros.stored, strict=True):
        for field in first:
            torch.testing.assert_close(first[field][stored], second[field][stored])


def one_view(idx: int, request: PromptView, state: Any, whole: Context, stored: Tensor | None) -> PrefillView:
    whole.request, whole.state = request, state
    view = whole.view(idx, 0)
    return dataclasses.replace(view, stored=stored)


@cases
def test_a_block_that_is_the_whole_context_is_decided_like_a_prompt(name: str, options: dict[str, Any]) -> None:
    """Nothing was stored before, so there are no holes and a query for every column."""
    whole = Context(kinds_of(FIRST[0], FIRST[1]))
    whole.seen = BLOCKS[0]
    lengths = whole.prompt.lengths
    request = PromptView(whole.prompt, Geometry(2, lengths, LAYERS, HEADS, DIM, DIM, 8), tuple(range(LAYERS)), LAYERS)
    method = made(name, options).for_model(ModelFacts(tuple(range(LAYERS)), LAYERS, "plain", lambda: "0" * 64))
    real = whole.prompt.real[:, None]
    decided: list[list[Decision]] = []
    for state, stored in (
        (method.begin(request), None),
        (method.continue_context(request, None), real.expand(-1, HEADS, -1)),
    ):
        views = [one_view(idx, request, state, whole, stored) for idx in range(LAYERS)]
        taken = [method.prefill(view) or Decision() for view in views]
        taken += [each for decision in taken for each in decision.earlier or []]
        decided.append(taken + list(method.after_prefill(PromptEndView(request, state)) or []))
    assert len(decided[0]) == len(decided[1])
    for first, second in zip(*decided, strict=True):
        for what in ("keep", "keys", "values", "chunks"):
            old, new = getattr(first, what), getattr(second, what)
            assert (old is None) == (new is None)
            if old is None:
                continue
            if what == "keep":
                old, new = (each & real for each in torch.broadcast_tensors(old, new))
            torch.testing.assert_close(old, new)
        for field, each in first.fields.items():
            if each.values is not None:
                torch.testing.assert_close(each.values * real, second.fields[field].values * real)


# ---- budgets


def budget(found: Context, share: float) -> Tensor:
    """Tokens per head [B] of a share of what has been read."""
    return (found.request.prompt.lengths.double() * share + 1e-9).floor().long()


@pytest.mark.parametrize("name", ["snapkv", "mixkv", "lookm", "h2o", "streaming", "random"])
def test_every_head_keeps_the_budget_of_the_context(name: str) -> None:
    found, method = context(), matrix.method(name, budget=0.5)
    for tokens in BLOCKS:
        found.read(method, tokens)
        want = budget(found, 0.5)
        assert torch.equal(found.counts(), want[:, None, None].expand(-1, LAYERS, HEADS))


def test_budgets_of_layers_and_heads() -> None:
    total = {"adakv": (2, 3), "sparsemm": (1, 2, 3), "pyramidkv": (1, 3), "vlcache": (1, 3), "prefixkv": (1, 3)}
    for name in total:
        method = matrix.method(name, budget=0.5)
        found = read(method)
        counts, size = found.counts(), budget(found, 0.5)
        each_head = counts.flatten(1).double()
        if name == "adakv":
            assert torch.equal(counts.sum(2), (size * HEADS)[:, None].expand(-1, LAYERS))
            assert (counts != counts[..., :1]).any()
        else:  # layers that stored too little for their new share keep all they have
            candidates = torch.stack([view.candidates.expand(-1, HEADS, -1).sum(-1) for view in found.views], 1)
            full = counts == candidates
            assert (each_head.mean(-1) <= found.request.budget_slots(0.5) / (LAYERS * HEADS)).all()
            assert bool(full.any()) or torch.equal(counts.flatten(1).sum(-1), found.request.budget_slots(0.5))


def test_ddes_keeps_its_steady_size_over_all_blocks() -> None:
    dap: dict[str, Any] = {"score_layer": 1, "r": 0.3}
    for options in (dap, {**dap, "scores": "shared"}, {**dap, "per_head_scores": True}, {"dap": False}):
        method = matrix.method("hae", **{"budget": 20, **options})
        found = context()
        for tokens in BLOCKS:
            found.read(method, tokens)
            assert (found.counts() == 20).all()
        steady = found.state.shared.steady if found.state.shared is not None else found.state.bins.layers[3].steady
        assert steady.tolist() == [20, 20]
        assert found.state.shared is not None or len(found.state.bins.layers) == LAYERS


def test_hybridkv_stays_within_the_budget_and_offloads_the_block() -> None:
    method = made("hybridkv", {"classify": "all_dynamic", "count_digests": False})
    found, before = context(), 0
    for tokens in BLOCKS:
        found.read(method, tokens)
        slots = found.counts() + torch.stack(found.chunks, 1) * 4
        assert (slots.flatten(1).sum(-1) <= found.request.budget_slots(0.5)).all()
        assert torch.equal(found.state.heads.slots, slots)
        everywhere = torch.stack(found.stored, 1) | torch.stack(found.offloaded, 1)
        assert torch.equal(everywhere.sum(-1), found.request.prompt.lengths[:, None, None].expand(-1, LAYERS, HEADS))
        assert int(torch.stack(found.offloaded).sum()) > before
        before = int(torch.stack(found.offloaded).sum())


def test_dynamic_heads_that_read_no_chunk_are_static_in_further_blocks() -> None:
    found = read(made("hybridkv", {"classify": "all_dynamic", "count_digests": False, "budget": 3}), blocks=BLOCKS[:1])
    assert found.state.starved.all()
    found.read(found.method, BLOCKS[1])
    assert found.state.heads.static.all()
    assert (found.counts() == 3).all()


def decode(found: Context, steps: int) -> list[list[Tensor]]:
    """Decode tokens after what has been read; return the positions [B, H, M] of all layers after every step."""
    batch, generator, seen = len(found.prompt.kinds), torch.Generator().manual_seed(5), found.seen
    places = torch.arange(seen).expand(batch, -1)
    layers = []
    for idx in range(LAYERS):
        keep = found.stored[idx][..., :seen]
        slots = PlainSlots(found.layers[idx][1][:, :, :seen], places, keep)
        for name, values in found.fields[idx].items():
            order = (~keep).to(torch.int8).argsort(dim=-1, stable=True)[..., : slots.max_length]
            slots.add_field(name, values[..., :seen].gather(-1, order))
        layers.append(slots)
    held = []
    for _ in range(steps):
        seen += 1
        for idx, slots in enumerate(layers):
            query, key = (
                torch.randn(batch, heads, 1, DIM, generator=generator, dtype=torch.float64)
                for heads in (HEADS * GROUP, HEADS)
            )
            slots.append(key, torch.tensor([seen - 1]))
            sums = attention_sum(slots, query, seen) if found.method.observes.attention_sum else None
            shared = idx, idx, query, SCALING, found.request, found.state
            decision = found.method.decode(DecodeView(*shared, slots, seen, sums)) or Decision()
            if decision.evict is not None:
                slots.evict(decision.evict.slots, decision.evict.counts)
            if decision.keep is not None:
                slots.keep(decision.keep)
        held.append([slots.positions().clone() for slots in layers])
    return held


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("h2o", {"budget": 15}, 15),
        ("hae", {"score_layer": 1, "budget": 15, "recycle_bin_size": 4}, 18),
        ("hae", {"score_layer": 1, "budget": 15, "recycle_bin_size": 4, "mode": "mark", "restore": False}, 18),
        ("hae", {"score_layer": 1, "budget": 15, "recycle_bin_size": 4, "scores": "shared"}, 19),
        ("hae", {"score_layer": 1, "budget": 15, "recycle_bin_size": 1, "sink": 2, "candidates": "prompt"}, 15),
    ],
)
def test_decoding_after_blocks_holds_the_steady_size(name: str, options: dict[str, Any], most: int) -> None:
    found = read(matrix.method(name, **options))
    for step in decode(found, 40):
        counts = torch.stack([(positions >= 0).sum(-1) for positions in step])
        assert int(counts.min()) >= 15
        assert int(counts.max()) <= most


def test_the_ring_of_streaming_goes_on_after_blocks() -> None:
    found = read(matrix.method("streaming", budget=12, sink=3))
    for step, held in enumerate(decode(found, 30), 1):
        for b in range(2):
            real = [c for c in range(found.seen) if found.prompt.real[b, c]] + list(
                range(found.seen, found.seen + step)
            )
            assert sorted(held[0][b, 0].tolist()) == real[:3] + real[-9:]


# ---- against definitions of a few lines


def test_snapkv_is_what_the_window_of_the_block_attends_to() -> None:
    found = read(matrix.method("snapkv", budget=0.4, window=5, kernel=3))
    size = budget(found, 0.4).tolist()
    for idx in range(LAYERS):
        view = found.views[idx]
        for b in range(2):
            block = [c for c in range(sum(BLOCKS[:2]), found.seen) if found.prompt.real[b, c]]
            received = attention(found, idx, slice(None))[b][:, :, block[-5:]].mean((1, 2))  # [H, N]
            for h in range(HEADS):
                may = view.positions[b, view.candidates[b, h]].tolist()
                score = {c: float(received[h, c]) if c in may[:-5] else 0.0 for c in range(found.seen)}
                pooled = {c: sum(score.get(c + d, 0.0) for d in (-1, 0, 1)) for c in may[:-5]}
                best = sorted(pooled, key=lambda c: -pooled[c])[: size[b] - 5]
                assert found.positions(idx)[b][h] == sorted(best + may[-5:])


def test_h2o_accumulates_over_blocks() -> None:
    found, method = context(), matrix.method("h2o", budget=0.4)
    sums = [torch.zeros(2, HEADS, found.prompt.columns, dtype=torch.float64) for _ in range(LAYERS)]
    for tokens in BLOCKS:
        start = found.seen
        found.read(method, tokens)
        size = budget(found, 0.4).tolist()
        for idx in range(LAYERS):
            sums[idx] += attention(found, idx, slice(start, found.seen)).sum((2, 3))
            view, held = found.views[idx], found.positions(idx)
            for b in range(2):
                for h in range(HEADS):
                    may = view.positions[b, view.candidates.expand(-1, HEADS, -1)[b, h]].tolist()
                    recent = size[b] - size[b] // 2
                    heavy = sorted(may[:-recent], key=lambda c: -float(sums[idx][b, h, c]))[: size[b] // 2]
                    assert held[b][h] == sorted(heavy + may[-recent:])
            stored = found.stored[idx]
            torch.testing.assert_close(found.fields[idx]["score"][stored], sums[idx][stored])


def test_streaming_is_sinks_and_the_newest() -> None:
    found, method = context(), matrix.method("streaming", budget=12, sink=3)
    for tokens in BLOCKS:
        found.read(method, tokens)
        for b in range(2):
            real = [c for c in range(found.seen) if found.prompt.real[b, c]]
            assert found.positions(0)[b][0] == real[:3] + real[-9:]
    assert found.state.lost.tolist() == [found.seen - 12] * 2  # the ring starts anew


def test_random_tokens_are_those_of_the_whole_context() -> None:
    method = matrix.method("random", budget=60)
    parts, whole = read(method), read(method, blocks=[sum(BLOCKS)])
    assert all(map(torch.equal, parts.stored, whole.stored))


def test_fastv_keeps_its_share_of_all_visual_tokens() -> None:
    found, method = context(), made("fastv", {"layer": 2, "ratio": 0.5})
    kept = torch.zeros(2, found.prompt.columns, dtype=torch.bool)
    for tokens in BLOCKS:
        start = found.seen
        found.read(method, tokens)
        assert all((found.stored[idx][:, 0] == found.prompt.real)[:, : found.seen].all() for idx in (0, 1))
        visual = found.request.prompt.visual
        last = [max(c for c in range(found.seen) if found.prompt.real[b, c]) for b in range(2)]
        score = attention(found, 1, slice(None)).mean((1, 2))
        may = kept.clone()
        may[:, start : found.seen] = True
        for b in range(2):
            able = [c for c in range(found.seen) if visual[b, c] and may[b, c]]
            count = int(visual[b].sum()) - int(visual[b].sum()) // 2
            best = sorted(able, key=lambda c: -float(score[b, last[b], c]))[:count]
            text = [c for c in range(found.seen) if found.prompt.real[b, c] and not visual[b, c]]
            assert found.positions(2)[b][0] == found.positions(3)[b][1] == sorted(best + text)
        kept = found.stored[3][:, 0].clone()


@pytest.mark.parametrize(
    "method",
    [
        matrix.method("hae", ddes=False, score_layer=1, target_visual_tokens=0.5, r=None),
        matrix.method("mustdrop", layers="0,1", target_visual_tokens=0.5, protect=0.0),
    ],
    ids=["hae", "mustdrop"],
)
@pytest.mark.parametrize("first", [[(9, [3]), (5, [3, 4])], [(14, [3, 4])]], ids=["prompt", "cut image"])
def test_images_are_judged_once_text_has_come_after_them(method: Method, first: list[tuple[int, list[int]]]) -> None:
    found = Context(kinds_of("tiiiiiitt" + "tiiii" + "iiii" + "tt" + "iittii" + "tttt"))
    for tokens, kept in (*first, (4, [3, 8]), (2, [3, 4]), (6, [3, 4, 1, 2]), (4, [3, 4, 1, 1])):
        found.read(method, tokens)
        stored, visual = found.stored[3][0, 0], found.prompt.visual[0]
        assert stored[~visual][: int((~visual)[: found.seen].sum())].all()
        spans = [(0, 9), (9, 18), (20, 22), (24, 26)][: len(kept)]
        assert [int((stored & visual)[a:b].sum()) for a, b in spans] == kept


def test_lookm_merges_what_a_head_stores_only() -> None:
    found = read(matrix.method("lookm", budget=0.4, merge="mean"), noise=100.0)
    decision = found.method.prefill(found.views[0])
    keep = decision.keep.expand(-1, HEADS, -1)
    assert decision.keys[keep].abs().max() < 10  # no noise in what stays
