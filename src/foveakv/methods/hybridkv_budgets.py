"""HybridKV's rules for automatic settings: chunk size, classes of heads, and digests within the budget.

None of this is in the paper (arXiv 2604.05887), whose constants suit its models and prompts.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from foveakv.core.budget import Geometry, digest_bytes

PAPER_THETA = 0.9
PAPER_RHO = 0.75
SENSIBLE = (0.2, 0.8)
"""The shares of dynamic heads between which the paper's theta is used."""
LEAST_DYNAMIC, MOST_DYNAMIC = 0.7, 0.8
"""The shares of dynamic heads between which the rule chooses otherwise."""
TEXT_ROOM = 1.5
"""Budget of a static head as a multiple of what text and window take, at which the rule aims."""
LEFT_TO_STATIC = 0.2
"""Mean budget of static heads as a share of the mean budget, where they cannot hold the text."""
MOST_RHO = 1.5
"""Mean budget of dynamic heads as a share of the mean budget, at most, where static heads cannot hold the text."""
DIGEST_SHARE = Fraction(1, 4)
"""The largest share of a budget that digests take."""
PAPER_CHUNK = 8
CHUNKS = (4, 8, 16, 32)
"""Sizes of automatic chunks."""
PAPER_CHUNKS_HELD = 32
"""Chunks of the paper's size that the mean budget holds where automatic chunks are not smaller."""
CHUNKS_HELD = 16
"""The mean budget holds as many chunks if these are larger than the paper's."""

Digest = Literal["model", "bf16", "int8", "int4"]


def digest_slots(geometry: Geometry, kind: Digest, chunk: int, context: int) -> Fraction:
    """Return the size of a dynamic head's digests for a prompt of `context` tokens, in slots."""
    each, once = digest_bytes(kind, geometry.head_dim, geometry.itemsize)
    return Fraction(context // chunk * each + once, geometry.slot_bytes)


def auto_digests(
    geometry: Geometry,
    kind: Digest | Literal["auto"],
    chunk: int | Literal["auto"],
    totals: list[int],
    dynamic: float,
) -> tuple[Digest, int]:
    """Return how digests are stored, and the tokens per chunk.

    The first of (int8, 4), (int4, 4), (int8, 8), (int4, 8), ... is used with which digests take no more than
    `DIGEST_SHARE` of the budget. Chunks are not smaller than the paper's 8 if the mean budget holds `PAPER_CHUNKS_HELD`
    of these, and larger only while it holds `CHUNKS_HELD` of them. A batch has one setting: that of the sequence that
    needs the smallest digests.

    Args:
        geometry: of the prompt.
        kind, chunk: what is not "auto" stays as it is.
        totals: slots of every sequence.
        dynamic: the largest share of heads that may be dynamic.
    """
    kinds: tuple[Digest, ...] = ("int8", "int4") if kind == "auto" else (kind,)
    every = [(own, size) for size in (CHUNKS if chunk == "auto" else (chunk,)) for own in kinds]
    needed = 0
    for total, context in zip(totals, geometry.contexts, strict=True):
        mean = total // geometry.heads
        least = PAPER_CHUNK if mean >= PAPER_CHUNKS_HELD * PAPER_CHUNK else CHUNKS[0]
        for place, (own, size) in enumerate(every):
            if chunk == "auto" and size < least:
                continue
            if chunk == "auto" and size > max(PAPER_CHUNK, mean // CHUNKS_HELD):
                break
            needed = max(needed, place)
            each, _ = digest_bytes(own, geometry.head_dim, geometry.itemsize)
            digests = Fraction(int(context) * each, size * geometry.slot_bytes) * Fraction(dynamic) * geometry.heads
            # Half a slot per head of tolerance: a share of the prompt is rounded down to whole slots.
            if digests <= DIGEST_SHARE * total + geometry.heads * Fraction(1, 2):
                break
    return every[needed]


def most_dynamic(geometry: Geometry, kind: Digest, chunk: int, totals: list[int]) -> list[int]:
    """Return for every sequence the number of dynamic heads whose digests take `DIGEST_SHARE` of the budget.

    A budget of the whole prompt, and a prompt shorter than a chunk, have no digests, so that all heads may be dynamic.
    """
    counts = []
    for total, context in zip(totals, geometry.contexts, strict=True):
        digests = geometry.heads * digest_slots(geometry, kind, chunk, int(context))
        free = not digests or total >= int(context) * geometry.heads
        most = geometry.heads if free else math.floor(DIGEST_SHARE * total * geometry.heads / digests)
        counts.append(min(most, geometry.heads))
    return counts


def minus_digests(geometry: Geometry, kind: Digest, chunk: int, totals: list[int], dynamic: list[int]) -> list[int]:
    """Return the slots of the budget minus the digests of `dynamic` heads, at least one slot per head.

    Nothing is subtracted from a budget of the whole prompt: all chunks are on the device, without digests.
    """
    left = []
    for total, context, heads in zip(totals, geometry.contexts, dynamic, strict=True):
        digests = math.ceil(heads * digest_slots(geometry, kind, chunk, int(context)))
        whole = total >= int(context) * geometry.heads
        left.append(total if whole else max(total - digests, geometry.heads))
    return left


def auto_static(scores: Tensor, text: int, total: int) -> Tensor:
    """Classify the heads of one sequence: bool [L, H], True for static heads.

    If the paper's theta of 0.9 makes `SENSIBLE` shares of the heads dynamic, it is used. Otherwise the heads with the
    lowest scores are dynamic, as many as give static heads `TEXT_ROOM` times the slots that text and window take: with
    a share d of dynamic heads, each at rho = 0.75 times the mean budget (Eq. 4), a static head gets (1 - rho d) / (1 -
    d) times the mean. The share is from `LEAST_DYNAMIC` to `MOST_DYNAMIC`.

    Args:
        scores: S of Eq. 3, [L, H].
        text: text tokens of the prompt, and those of the window besides.
        total: slots of the budget.
    """
    heads = scores.numel()
    static = scores >= PAPER_THETA
    if SENSIBLE[0] * heads <= heads - int(static.sum()) <= SENSIBLE[1] * heads:
        return static
    return ~lowest(scores, round(dynamic_share(TEXT_ROOM * text * heads / total) * heads))


def dynamic_share(need: float) -> float:
    """Return the share of dynamic heads with which a static head gets `need` times the mean budget, within bounds."""
    if need <= 1:
        return LEAST_DYNAMIC
    return min(max((need - 1) / (need - PAPER_RHO), LEAST_DYNAMIC), MOST_DYNAMIC)


def auto_rho(static: Tensor, text: int, total: int) -> float:
    """Return rho of Eq. 4 for one sequence.

    It is the paper's 0.75 if static heads then hold the text and the window. If they do not, visual tokens would get
    nothing there: static heads get `LEFT_TO_STATIC` of the mean budget instead, and dynamic heads, which retrieve text
    and visual tokens alike, at most `MOST_RHO` times the mean.

    Args:
        static: bool [L, H].
        text: text tokens of the prompt, and those of the window besides.
        total: slots of the budget, digests not included.
    """
    heads, kept = static.numel(), int(static.sum())
    if kept in (0, heads):
        return PAPER_RHO
    if total * (heads - PAPER_RHO * (heads - kept)) >= text * kept * heads:
        return PAPER_RHO
    dynamic = (heads - kept) / heads
    return max(PAPER_RHO, min(MOST_RHO, (1 - LEFT_TO_STATIC * (1 - dynamic)) / dynamic))


def lowest(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` lowest scores, the first of equal ones: bool, of the shape of `scores`."""
    order = scores.flatten().argsort(stable=True)
    marks = torch.zeros(order.numel(), dtype=torch.bool, device=scores.device)
    marks[order[: max(count, 0)]] = True
    return marks.view(scores.shape)


def fewer_dynamic(scores: Tensor, static: Tensor, most: list[int]) -> Tensor:
    """Return `static`, bool [B, ...], with the highest-scored dynamic heads made static where there are too many.

    scores: [B, ...]. most: dynamic heads that each sequence may have among these.
    """
    rows = [
        own if int((~own).sum()) <= count else ~lowest(row.masked_fill(own, torch.inf), count)
        for row, own, count in zip(scores, static, most, strict=True)
    ]
    return torch.stack(rows)
