"""InfiniPot-V and the baselines by frame, against references of a few lines."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from foveakv import errors, methods
from foveakv.core.budget import Geometry
from foveakv.core.frames import frame_sizes, frames_of
from foveakv.core.prompt import IMAGE, PAD, TEXT, VIDEO, PromptMap
from foveakv.methods import PrefillView, PromptView

HEADS, DIM, LAYERS = 2, 8, 4
FRAMES, PLACES = 8, 9
NAMES = ["infinipotv", "newest_frames", "uniform_frames"]


def stream(frames: int = FRAMES, places: int = PLACES, text: int = 1) -> list[int]:
    """Four words, then frames with `text` words before each."""
    return [TEXT] * 4 + ([TEXT] * text + [IMAGE] * places) * frames


def view(
    kinds: list[int], stored: Tensor | None = None, columns: Tensor | None = None, layer: int = 3, seed: int = 0
) -> PrefillView:
    """One layer of one sequence with random keys and values; columns: those that are left of the context."""
    context = PromptMap(torch.tensor([kinds]))
    positions = torch.arange(len(kinds)) if columns is None else columns
    random = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, HEADS, len(kinds), DIM, generator=random)[:, :, positions] for _ in range(2))
    request = PromptView(context, Geometry(1, [len(kinds)], LAYERS, HEADS, DIM, DIM, 4), tuple(range(LAYERS)), LAYERS)
    prompt = context.take(positions[None])
    return PrefillView(
        layer, layer, keys, 1.0, request, None, keys, values, positions[None], prompt, None, stored=stored
    )


def keep(name: str, seen: PrefillView, **options: Any) -> Tensor:
    """What each head keeps: bool [H, C]."""
    decision = methods.get(name, **options).prefill(seen)
    assert decision is not None
    assert decision.keep is not None
    return decision.keep.expand(1, HEADS, -1)[0]


def test_frames_are_images_and_runs_of_video() -> None:
    prompt = PromptMap(torch.tensor([[PAD, TEXT, IMAGE, IMAGE, TEXT, VIDEO, VIDEO, VIDEO, VIDEO, TEXT, IMAGE]]))
    frame, place = frames_of(prompt)
    assert frame.tolist() == [[-1, -1, 0, 0, -1, 1, 1, 1, 1, -1, 2]]
    assert place.tolist() == [[-1, -1, 0, 1, -1, 0, 1, 2, 3, -1, 0]]
    frame, place = frames_of(prompt, 2)
    assert frame.tolist() == [[-1, -1, 0, 0, -1, 1, 1, 2, 2, -1, 3]]
    assert place.tolist() == [[-1, -1, 0, 1, -1, 0, 1, 0, 1, -1, 0]]


def test_sizes_of_frames() -> None:
    prompt = PromptMap(torch.tensor([[TEXT, IMAGE, IMAGE, TEXT, IMAGE], [PAD, PAD, IMAGE, IMAGE, IMAGE]]))
    assert frame_sizes(*frames_of(prompt)).tolist() == [[0, 2, 2, 0, 1], [0, 0, 3, 3, 3]]


def test_the_pieces_of_an_image_are_one_frame() -> None:
    kinds = torch.tensor([[IMAGE, IMAGE, TEXT, IMAGE, IMAGE, TEXT, IMAGE]])
    prompt = PromptMap(kinds, torch.tensor([[0, 0, -1, 0, 0, -1, 1]]))
    frame, place = frames_of(prompt)
    assert frame.tolist() == [[0, 0, -1, 0, 0, -1, 1]]
    assert place.tolist() == [[0, 1, -1, 2, 3, -1, 0]]


def golden(seen: PrefillView, size: int, h: int, pool: int, square: bool) -> set[int]:
    """InfiniPot-V for one head with all of the context stored: first all text (it fits), then the two rules."""
    keys, norms = seen.keys[0, h], seen.values[0, h].norm(dim=-1)
    text = [c for c in range(keys.shape[0]) if seen.prompt.kinds[0, c] == TEXT]
    start = {f: 5 + f * (PLACES + 1) for f in range(FRAMES)}
    columns = [start[f] + p for f in range(FRAMES) for p in range(PLACES)]
    recent, room = range(FRAMES - FRAMES // 4, FRAMES), size - len(text)

    def likeness(f: int, p: int) -> float:
        key = keys[start[f] + p]
        return sum(float(torch.cosine_similarity(key, keys[start[r] + p], dim=0)) for r in recent) / len(recent)

    def pooled(f: int, p: int) -> float:
        if not square:
            near = [q for q in range(PLACES) if abs(p - q) <= pool // 2]
        else:
            near = [q for q in range(PLACES) if max(abs(p // 3 - q // 3), abs(p % 3 - q % 3)) <= pool // 2]
        return float(sum(norms[start[f] + q] for q in near)) / len(near)

    places = [(f, p) for f in range(FRAMES) for p in range(PLACES)]
    by_time = sorted(places, key=lambda fp: (-99.0 - fp[0] * PLACES - fp[1]) if fp[0] in recent else likeness(*fp))
    chosen = by_time[: room - round(room * 0.5)]
    rest = sorted((fp for fp in places if fp not in chosen), key=lambda fp: -pooled(*fp))
    kept = {start[f] + p for f, p in chosen + rest[: room - len(chosen)]}
    assert kept < set(columns)
    return kept | set(text)


@pytest.mark.parametrize(("layer", "pool", "square"), [(0, 7, True), (1, 5, True), (2, 3, False), (3, 1, False)])
@pytest.mark.parametrize("size", [36, 60])
def test_infinipotv_equals_its_definition(size: int, layer: int, pool: int, square: bool) -> None:
    seen = view(stream(), layer=layer, seed=layer)
    kept = keep("infinipotv", seen, budget=size)
    for h in range(HEADS):
        assert set(torch.nonzero(kept[h]).flatten().tolist()) == golden(seen, size, h, pool, square)


def test_pooling_can_be_left_out_and_rows_can_be_given() -> None:
    assert torch.equal(
        keep("infinipotv", view(stream(), layer=0), budget=50, pool=False),
        keep("infinipotv", view(stream()), budget=50),
    )
    narrow = keep("infinipotv", view(stream(), layer=0), budget=50, row_tokens=9)
    assert not torch.equal(narrow, keep("infinipotv", view(stream(), layer=0), budget=50))


def test_a_token_that_changes_stays_and_a_constant_one_goes() -> None:
    """A screen on which one place shows something else in one old frame."""
    seen = view(stream(), layer=3)
    still = torch.randn(1, HEADS, PLACES, DIM, generator=torch.Generator().manual_seed(5))
    for f in range(FRAMES):
        first = 5 + f * (PLACES + 1)
        seen.keys[:, :, first : first + PLACES] = still
    changed = 5 + 2 * (PLACES + 1) + 4
    seen.keys[:, :, changed] = -still[:, :, 4]
    seen.values[:, :, changed] *= 1e-3  # not for its value
    kept = keep("infinipotv", seen, budget=12 + 60)
    assert kept[:, changed].all()


@pytest.mark.parametrize("name", NAMES)
def test_every_head_keeps_its_budget_of_what_it_stores(name: str) -> None:
    """A further block: heads that store different tokens, padding, and frames with holes."""
    kinds = stream(12)
    columns = torch.cat([torch.arange(0, 60), torch.arange(74, len(kinds))])
    stored = torch.ones(1, HEADS, len(columns), dtype=torch.bool)
    stored[0, 0, 20:40] = False
    stored[0, 1, 10:30] = False
    if name != "infinipotv":
        stored[:, 1] = stored[:, 0]
    seen = view(kinds, stored=stored, columns=columns)
    kept = keep(name, seen, budget=45)
    assert kept.sum(-1).tolist() == [45, 45]
    assert not bool((kept & ~stored[0]).any())
    assert kept[:, :4].all(), "text before the first frame stays"


@pytest.mark.parametrize("name", NAMES)
def test_text_gets_its_share(name: str) -> None:
    seen = view(stream(8, text=6))  # 52 words
    text = seen.prompt.text[0]
    few = keep(name, seen, budget=64, text_share=0.25)
    assert (few & text).sum(-1).tolist() == [16, 16]
    assert few[:, :10].all(), "text before the first frame stays"
    assert few[:, 4 + 7 * 15 : 4 + 7 * 15 + 6].all(), "the newest text stays"
    assert (keep(name, seen, budget=120, text_share=0.25) & text).sum(-1).tolist() == [48, 48], "visual tokens are out"
    words = view([TEXT] * 30)
    assert torch.nonzero(keep(name, words, budget=10)[0]).flatten().tolist() == list(range(20, 30))


def test_newest_frames() -> None:
    kept = keep("newest_frames", view(stream()), budget=12 + 2 * PLACES + 3)
    visual = torch.nonzero(kept[0] & view(stream()).prompt.visual[0]).flatten()
    assert len(visual) == 2 * PLACES + 3
    assert int(visual.min()) == 5 + 5 * (PLACES + 1) + PLACES - 3


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 40])
def test_uniform_frames_of_a_stream_are_those_of_the_whole(count: int) -> None:
    """Block by block, what is left equals what is kept of everything at once, and its distances are regular."""
    places, room = 3, 5 * 3
    held: set[int] = set()
    for frames in range(1, count + 1):
        kinds = stream(frames, places, 0)
        columns = torch.tensor(sorted(held | set(range(4 + (frames - 1) * places, len(kinds))) | set(range(4))))
        kept = keep("uniform_frames", view(kinds, columns=columns), budget=4 + room)
        held = set(columns[kept[0]].tolist())
    whole = keep("uniform_frames", view(stream(count, places, 0)), budget=4 + room)
    assert held == set(torch.nonzero(whole[0]).flatten().tolist())
    numbers = sorted({(c - 4) // places for c in held if c >= 4})
    step = math.gcd(*numbers) if any(numbers) else 1
    assert numbers[0] == 0
    assert {b - a for a, b in itertools.pairwise(numbers)} <= {step, 2 * step}


@pytest.mark.parametrize("name", NAMES)
def test_wrong_options(name: str) -> None:
    with pytest.raises(errors.MethodError, match="text_share"):
        methods.get(name, text_share=2)
    with pytest.raises(errors.BudgetError):
        methods.get(name, budget=0)
