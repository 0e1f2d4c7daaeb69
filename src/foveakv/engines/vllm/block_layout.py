"""Which slots of which blocks hold the stored tokens of a request: pure functions.

vLLM gives a request a table of blocks, and token t of the context the slot t % size of entry t // size. After E tokens
have been evicted, the plugin stores the others, in order, in slots 0, 1, ... of the table's remaining entries. New
tokens follow, so token t of the context is stored as number t - E. Entries that are left over are freed, from the end
of the table: E // size of them, the most that leaves room for every later token, since vLLM adds an entry for every
`size` tokens of the context. While decoding E grows, and so the freed entries need not be consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def entries_of(tokens: int, size: int) -> int:
    """Return how many blocks of `size` slots hold `tokens` tokens."""
    return -(-tokens // size)


def freed_entries(tokens: int, evicted: int, size: int, freed: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the entries to free once `evicted` of `tokens` tokens have been evicted: the last ones, ascending.

    freed: entries that have been freed before; they are not returned again.
    """
    used = [entry for entry in range(entries_of(tokens, size)) if entry not in set(freed)]
    return tuple(used[len(used) - (evicted // size - len(freed)) :])


def runs_of(entries: Sequence[int]) -> list[tuple[int, int]]:
    """Split ascending entries into consecutive ones: pairs (first, last + 1)."""
    found: list[tuple[int, int]] = []
    for entry in entries:
        if found and found[-1][1] == entry:
            found[-1] = found[-1][0], entry + 1
        else:
            found.append((entry, entry + 1))
    return found


def without_entries(table: Tensor, freed: tuple[int, ...]) -> Tensor:
    """Remove entries of block tables: integers [..., entries] -> the same shape, zeros at the end."""
    if not freed:
        return table
    left = torch.ones(table.shape[-1], dtype=torch.bool)
    left[list(freed)] = False
    rest = torch.zeros_like(table)
    rest[..., : table.shape[-1] - len(freed)] = table[..., left]
    return rest


def slots_of(table: Tensor, numbers: Tensor, size: int) -> Tensor:
    """Return the slots of stored tokens: table int [entries], numbers int64 [n] from 0 -> int64 [n]."""
    return table.long()[numbers // size] * size + numbers % size
