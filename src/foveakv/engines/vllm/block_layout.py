"""Which slots of which blocks hold the stored tokens of a request: pure functions.

vLLM gives a request a table of blocks, and token t of the context the slot t % size of entry t // size. After E tokens
have been evicted, the plugin stores the others, in order, in slots 0, 1, ... of the table's remaining entries. New
tokens follow, so token t of the context is stored as number t - E. Entries that are left over are freed: E // size of
them, the most that leaves room for every later token, since vLLM adds an entry for every `size` tokens of the context.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entries_of(tokens: int, size: int) -> int:
    """Return how many blocks of `size` slots hold `tokens` tokens."""
    return -(-tokens // size)


def freed_entries(tokens: int, evicted: int, size: int) -> tuple[int, ...]:
    """Return the entries to free once `evicted` of `tokens` tokens have been evicted: the last ones, ascending."""
    entries = entries_of(tokens, size)
    return tuple(range(entries - evicted // size, entries))


def without_entries(table: Tensor, freed: tuple[int, ...]) -> Tensor:
    """Remove entries [first, last] of block tables: integers [..., entries] -> the same shape, zeros at the end.

    freed: consecutive entries, as `freed_entries` returns them.
    """
    if not freed:
        return table
    first, behind = freed[0], freed[-1] + 1
    rest = torch.zeros_like(table)
    rest[..., :first] = table[..., :first]
    rest[..., first : table.shape[-1] - len(freed)] = table[..., behind:]
    return rest


def slots_of(table: Tensor, numbers: Tensor, size: int) -> Tensor:
    """Return the slots of stored tokens: table int [entries], numbers int64 [n] from 0 -> int64 [n]."""
    return table.long()[numbers // size] * size + numbers % size
