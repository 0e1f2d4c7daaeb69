"""Where the tokens of a compressed request are stored, without vLLM."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from foveakv.engines.vllm.block_layout import (
    entries_of,
    freed_entries,
    runs_of,
    slots_of,
    without_entries,
)

SIZES = st.sampled_from([1, 2, 16, 32])


@given(SIZES, st.integers(1, 300), st.data())
def test_freed_entries_leave_room_for_all_later_tokens(size: int, tokens: int, data: st.DataObject) -> None:
    evicted = data.draw(st.integers(0, tokens - 1))
    freed = freed_entries(tokens, evicted, size)
    assert len(freed) == evicted // size
    for later in range(tokens, tokens + 3 * size):
        room = (entries_of(later, size) - len(freed)) * size
        assert room >= later - evicted
    # One more freed entry would be too many for some later token.
    assert any((entries_of(n, size) - len(freed) - 1) * size < n - evicted for n in range(tokens, tokens + size))


@given(SIZES, st.integers(1, 300), st.data())
def test_stored_tokens_have_slots_of_their_own_in_kept_entries(size: int, tokens: int, data: st.DataObject) -> None:
    evicted = data.draw(st.integers(0, tokens - 1))
    later = tokens + data.draw(st.integers(0, 3 * size))
    freed = freed_entries(tokens, evicted, size)
    entries = entries_of(later, size)
    table = torch.randperm(entries + 5)[:entries].to(torch.int32)
    rest = without_entries(table, freed)
    slots = slots_of(rest, torch.arange(later - evicted), size).tolist()
    assert len(set(slots)) == later - evicted
    used = {slot // size for slot in slots}
    assert used <= set(table.tolist()) - {int(table[entry]) for entry in freed}


def test_tables_keep_their_shape_and_their_order() -> None:
    table = torch.tensor([[4, 7, 2, 9, 5], [1, 2, 3, 4, 5]])
    assert without_entries(table, (1, 2)).tolist() == [[4, 9, 5, 0, 0], [1, 4, 5, 0, 0]]
    assert without_entries(table[0], (4,)).tolist() == [4, 7, 2, 9, 0]
    assert without_entries(table, ()) is table
    assert without_entries(table[0], (1, 3)).tolist() == [4, 2, 5, 0, 0]


@given(SIZES, st.integers(1, 100), st.lists(st.integers(0, 3), max_size=200), st.data())
def test_entries_are_freed_while_decoding(size: int, prompt: int, steps: list[int], data: st.DataObject) -> None:
    evicted = data.draw(st.integers(0, prompt - 1))
    freed = freed_entries(prompt, evicted, size)
    for tokens, more in enumerate(steps, prompt + 1):
        assert (entries_of(tokens, size) - len(freed)) * size >= tokens - evicted  # room for the new token
        evicted = min(evicted + more, tokens - 1)
        new = freed_entries(tokens, evicted, size, freed)
        assert list(new) == sorted(set(new) - set(freed))
        freed = tuple(sorted((*freed, *new)))
        assert len(freed) == evicted // size
        assert 0 not in freed  # requests are recognized by their first block
        assert all(entry < entries_of(tokens, size) for entry in new)


def test_entries_are_split_into_consecutive_ones() -> None:
    assert runs_of(()) == []
    assert runs_of((3, 4, 5, 8, 10, 11)) == [(3, 6), (8, 9), (10, 12)]
