"""A request that is recomputed after a preemption sees, token by token, what it saw before; without vLLM."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveakv.engines.vllm.block_layout import entries_of, freed_entries, slots_of, without_entries
from foveakv.engines.vllm.replay import segments
from foveakv.engines.vllm.stored import Compressed, Eviction, Step

SIZE = 4


def evict(draw: random.Random, stored: int, tokens: int) -> Eviction:
    """An eviction as methods decide it: compacted in order, or with the holes filled from the end."""
    gone = set(draw.sample(range(stored), draw.randint(1, stored - 1)))
    if draw.random() < 0.5:
        order = [each for each in range(stored) if each not in gone]
    else:
        left = stored - len(gone)
        last = [each for each in range(left, stored) if each not in gone]
        order = [last.pop() if each in gone else each for each in range(left)]
    moved = [(old, new) for new, old in enumerate(order) if old != new]
    source, target = (torch.tensor([pair[i] for pair in moved], dtype=torch.int64) for i in range(2))
    return Eviction(tokens, len(order), source, target)


@given(st.integers(0, 10**9))
def test_every_token_sees_what_it_saw_first(seed: int) -> None:
    draw = random.Random(seed)
    prompt, decoded = draw.randint(2, 20), draw.randint(1, 30)
    kept = torch.tensor(sorted(draw.sample(range(prompt), draw.randint(1, prompt))))
    known = Compressed("a", kept, prompt)
    seen: dict[int, set[int]] = {}
    for tokens in range(prompt + 1, prompt + decoded + 1):
        stored = known.stored(tokens)
        seen[tokens - 1] = set(stored.tolist())
        if draw.random() < 0.3 and stored.shape[0] > 1:
            known.history.append(evict(draw, stored.shape[0], tokens))
            known.carry_out(known.history[-1])
    final, total = known.stored(prompt + decoded).tolist(), prompt + decoded

    known.reset()
    table = torch.randperm(entries_of(total, SIZE) + 3)
    slots = torch.full((table.shape[0] * SIZE,), -1)  # the token that each slot stores
    start = 0
    while start < total:
        stop = min(total, start + draw.randint(1, 12))
        new = torch.arange(start, stop)
        if start < prompt:
            blocks, offset, first = table, 0, prompt
        else:
            blocks, offset, first = without_entries(table, known.freed), known.evicted, start
        slots[slots_of(blocks, new - offset, SIZE)] = new
        if stop >= prompt:
            step = Step(known, first, stop, 0, blocks[: entries_of(stop, SIZE) - len(known.freed)], offset)
            made = segments(step, SIZE, compact=start < prompt)
            for each in made:
                slots[each.target] = slots[each.source].clone()
                visible = slots[slots_of(blocks, torch.arange(each.length), SIZE)].tolist()
                for token in range(each.start, each.stop):
                    assert set(visible[: each.length - (each.stop - 1 - token)]) == seen[token]
            if not made:
                visible = slots[slots_of(blocks, torch.arange(stop - offset), SIZE)].tolist()
                assert set(visible) == seen[stop - 1]
            assert not made or sum(each.stop - each.start for each in made) == stop - first
            for eviction in known.missing(stop):
                known.carry_out(eviction)
            more = freed_entries(stop, known.evicted, SIZE, known.freed)
            known.freed = tuple(sorted((*known.freed, *more)))
        start = stop
    assert known.stored(total).tolist() == final
    live = without_entries(table[: entries_of(total, SIZE)], known.freed)
    assert slots[slots_of(live, torch.arange(len(final)), SIZE)].tolist() == final


def test_steps_without_evictions_to_repeat_need_no_replay() -> None:
    known = Compressed("a", torch.tensor([0, 2]), 4)
    step = Step(known, 4, 5, 0, torch.tensor([3, 1]), known.evicted)
    assert segments(step, SIZE, compact=False) == []


@pytest.mark.parametrize("tokens", [4, 6])
def test_stored_tokens_follow_the_evictions(tokens: int) -> None:
    known = Compressed("a", torch.tensor([0, 2, 3]), 4)
    known.history.append(Eviction(5, 2, torch.tensor([3]), torch.tensor([1])))
    if tokens > 4:
        known.carry_out(known.history[0])
    assert known.stored(tokens).tolist() == ([0, 2, 3] if tokens == 4 else [0, 4, 5])
    assert known.evicted == (1 if tokens == 4 else 3)
    known.reset()
    assert known.stored(4).tolist() == [0, 2, 3]
    assert len(known.missing(5)) == 1
    assert known.missing(4) == []
