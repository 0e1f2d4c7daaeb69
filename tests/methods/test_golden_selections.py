"""Selections on fixed tensors against definitions of a few lines, for a prompt and for the blocks after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import matrix
import pytest
import torch
from plain_blocks import HEADS, LAYERS, Context, attention, kinds_of
from torch import Tensor

Scores = dict[int, float]
"""By position."""

BLOCKS = (42, 24, 15)
CONTEXT = (
    "ttiiiiiiiiitttiiiiiiiiiitttttttttttttttttt" + "tttiiiiiiiiiiiitttttttttt" + "tttttttttttttt",
    ".....ttiiiiiiiiiiiiiittttttiiiiitttttttttt" + "...tiiiiiiiiiiiiiiiiiitt" + "tttttttttttt...",
)


def blocks(name: str, **options: Any) -> Iterator[tuple[Context, int]]:
    """The context after every block, and the column at which the block began."""
    found, method = Context(kinds_of(*CONTEXT)), matrix.method(name, **options)
    for tokens in BLOCKS:
        start = found.seen
        found.read(method, tokens)
        yield found, start


def heads(found: Context, layer: int) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Sequence, head, the positions that it may keep and those that it keeps."""
    view, held = found.views[layer], found.positions(layer)
    may = view.candidates.expand(-1, HEADS, -1)
    for b in range(len(CONTEXT)):
        for h in range(HEADS):
            yield b, h, view.positions[b, may[b, h]].tolist(), held[b][h]


def real(found: Context, b: int, start: int) -> list[int]:
    return [c for c in range(start, found.seen) if found.prompt.real[b, c]]


def size(found: Context, share: float) -> list[int]:
    return [int(share * n + 1e-9) for n in found.request.prompt.lengths.tolist()]


def by_score(scores: Tensor | Scores, columns: list[int], count: int) -> list[int]:
    return sorted(columns, key=lambda c: -float(scores[c]))[: max(count, 0)]


def received(found: Context, layer: int, start: int, rows: Callable[[int], list[int]]) -> Tensor:
    """What each column receives from some rows of each sequence, over the query group: [B, H, N]."""
    probs = attention(found, layer, slice(None))
    return torch.stack([probs[b][:, :, rows(b)].sum((1, 2)) for b in range(len(CONTEXT))])


def of_window(found: Context, layer: int, start: int, rows: int = 5) -> Tensor:
    return received(found, layer, start, lambda b: real(found, b, start)[-rows:])


WINDOW: dict[str, Any] = {"budget": 0.4, "window": 5, "kernel": 1}


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "sparsemm"])
def test_the_window_and_what_it_attends_to(name: str) -> None:
    for found, start in blocks(name, **WINDOW):
        counts = found.counts()
        for layer in range(LAYERS):
            scores = of_window(found, layer, start)
            for b, h, may, held in heads(found, layer):
                if name == "snapkv":
                    assert len(held) == size(found, 0.4)[b]
                recent = min(5, len(held) // 2 if name == "pyramidkv" else 5)  # half of a layer's budget at most
                assert held == sorted(may[-recent:] + by_score(scores[b, h], may[:-recent], len(held) - recent))
        if start == 0:
            want = [n * LAYERS * HEADS for n in size(found, 0.4)]
            assert counts.flatten(1).sum(-1).tolist() == want
            if name == "pyramidkv":
                sizes = counts[:, :, 0].double()
                steps = torch.arange(LAYERS) / (LAYERS - 1)
                line = sizes[:, :1] + (sizes[:, -1:] - sizes[:, :1]) * steps
                assert (sizes[:, 0] > sizes[:, -1]).all()
                assert ((sizes - line).abs() < 1).all()  # linear, but for rounding


def test_adakv() -> None:
    for found, start in blocks("adakv", **WINDOW):
        for layer in range(LAYERS):
            scores = of_window(found, layer, start)
            every = {(b, h): (may, held) for b, h, may, held in heads(found, layer)}
            for b, n in enumerate(size(found, 0.4)):
                own = {h: by_score(scores[b, h], every[b, h][0][:-5], int((n - 5) * 0.2)) for h in range(HEADS)}
                rest = [(h, c) for h in range(HEADS) for c in every[b, h][0][:-5] if c not in own[h]]
                rest.sort(key=lambda at: -float(scores[b, at[0], at[1]]))
                taken = rest[: (n - 5) * HEADS - sum(map(len, own.values()))]
                for h in range(HEADS):
                    best = own[h] + [c for head, c in taken if head == h]
                    assert every[b, h][1] == sorted(best + every[b, h][0][-5:])


def test_mixkv() -> None:
    def scaled(values: Scores, scores: Scores) -> Scores:
        low, high = min(values.values()), max(values.values())
        share = {c: (x - low) / (high - low) for c, x in values.items()}
        factor = sum(scores.values()) / sum(share.values())
        return {c: x * factor for c, x in share.items()}

    for found, start in blocks("mixkv", **WINDOW):
        for layer in range(LAYERS):
            _, keys, values = found.layers[layer]
            window = of_window(found, layer, start) / 10  # 5 rows of 2 query heads
            for b, h, may, held in heads(found, layer):
                unit = torch.nn.functional.normalize(keys[b, h], dim=-1)
                pairs = unit[may] @ unit[may].mT
                n = len(may)
                r = min(max(float((pairs.sum() - pairs.trace()) / (n * (n - 1))), 0.0), 1.0)
                own = may[:-5]
                score = {c: float(window[b, h, c]) for c in own}
                unlike = scaled({c: -float(unit[c] @ unit[may].mean(0)) for c in own}, score)
                length = scaled({c: float(values[b, h, c].norm()) for c in own}, score)
                mixed = {c: r * unlike[c] + (1 - r) * (score[c] + length[c]) for c in own}
                assert held == sorted(may[-5:] + by_score(mixed, own, size(found, 0.4)[b] - 5))


@pytest.mark.parametrize("visual_share", [0.0, 0.5])
def test_lookm_keeps_text_first(visual_share: float) -> None:
    for found, start in blocks("lookm", budget=0.5, merge="none", recent_ratio=0.3, visual_share=visual_share):
        for layer in range(LAYERS):
            scores = received(found, layer, start, lambda b: real(found, b, start))  # noqa: B023
            for b, h, may, held in heads(found, layer):
                n = size(found, 0.5)[b]
                recent = max(1, int(n * 0.3 + 1e-9))
                text = [c for c in may[:-recent] if found.prompt.text[b, c]]
                others = [c for c in may[:-recent] if not found.prompt.text[b, c]]
                left = min(int((n - recent) * visual_share + 1e-9), len(others))
                best = by_score(scores[b, h], text, n - recent - left)
                best += by_score(scores[b, h], others, n - recent - len(best))
                assert held == sorted(best + may[-recent:])


def test_vlcache_ranks_by_post_vision_attention() -> None:
    for found, start in blocks("vlcache", budget=0.4):

        def after(b: int) -> list[int]:
            own = real(found, b, start)  # noqa: B023
            last = max((c for c in own if found.prompt.visual[b, c]), default=-1)  # noqa: B023
            return [c for c in own if c > last]

        for layer in range(LAYERS):
            scores = received(found, layer, start, after)
            for b, h, may, held in heads(found, layer):
                recent = min(int(size(found, 0.4)[b] * 0.1 + 1e-9), len(held))
                newest = may[len(may) - recent :]
                best = by_score(scores[b, h], may[: len(may) - recent], len(held) - recent)
                assert held == sorted(best + newest)
        tokens = found.state.tokens
        assert torch.equal(tokens.sum(-1), found.request.budget_slots(0.4) // HEADS)
        assert (found.counts()[..., 0] <= tokens).all()


def test_prefixkv_holds_one_share_in_all_layers() -> None:
    for found, start in blocks("prefixkv", budget=0.4, sink=2, recent=1):
        for b in range(len(CONTEXT)):
            before, beyond = [], []
            for layer in range(LAYERS):
                scores = received(found, layer, start, lambda b: real(found, b, start))[b].sum(0)  # noqa: B023
                _, _, may, held = next(each for each in heads(found, layer) if each[0] == b)
                first = [*may[:2], may[-1]]
                ranked = first + by_score(scores, [c for c in may if c not in first], len(may))
                assert held == sorted(ranked[: len(held)])
                total = float(scores[may].sum())
                cumulative = [float(scores[ranked[:n]].sum()) / total for n in range(len(ranked) + 1)]
                before.append(cumulative[len(held) - 1])
                if len(held) < len(ranked):
                    beyond.append(cumulative[len(held)])
            assert max(before) <= min(beyond, default=1.0) + 1e-12  # nobody's last token comes after another's next


def test_dap_of_one_layer_decides_for_all() -> None:
    options: dict[str, Any] = {"ddes": False, "score_layer": 1, "r": 0.9, "alpha": None, "value_norm": False}
    gone: set[tuple[int, int]] = set()
    for found, start in blocks("hae", **options):
        probs = attention(found, 1, slice(None)).mean((1, 2))  # [B, N, N]
        for b in range(len(CONTEXT)):
            text = [c for c in real(found, b, start) if found.prompt.text[b, c]]
            judged = [c for c in range(start, found.seen) if found.prompt.visual[b, c]]  # text ends every block
            mean = {c: float(probs[b, [i for i in text if i >= c], c].mean()) for c in judged}
            limit = 0.9 / max(len(judged), 1) * sum(mean.values())
            gone |= {(b, c) for c in judged if mean[c] < limit}
            want = [c for c in real(found, b, 0) if (b, c) not in gone]
            assert all(found.positions(layer)[b][h] == want for layer in range(LAYERS) for h in range(HEADS))
    assert len(gone) > 20


def test_static_heads_of_hybridkv() -> None:
    for found, start in blocks("hybridkv", budget=0.4, classify="all_static", window=4, visual_share=0.3):
        budgets = found.state.heads.budgets
        assert (budgets.flatten(1).sum(-1) <= found.request.budget_slots(0.4)).all()
        for layer in range(LAYERS):
            scores = of_window(found, layer, start, rows=4)
            for b, h, may, held in heads(found, layer):
                n = int(budgets[b, layer, h])
                recent = max(1, min(4, int(n * 0.5), n))
                text = [c for c in may[:-recent] if found.prompt.text[b, c]]
                others = [c for c in may[:-recent] if not found.prompt.text[b, c]]
                left = min(int((n - recent) * 0.3 + 1e-9), len(others))
                best = by_score(scores[b, h], text, n - recent - left)
                best += by_score(scores[b, h], others, n - recent - len(best))
                assert held == sorted(best + may[-recent:])
