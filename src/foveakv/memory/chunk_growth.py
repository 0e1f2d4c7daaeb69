"""Add chunks to a store when a further block of a context has been read.

`withdraw` before the decision, `extend` with what leaves the segments, then `ChunkStore.reserve` again. Notation as in
`chunks.py`. Rows of the store are the heads that choose; heads whose chunks all had slots have ordinary slots only.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from foveakv.core.columns import real_first
from foveakv.memory.chunk_files import ChunkWriter
from foveakv.memory.chunks import ChunkStore
from foveakv.memory.digests import Digests, summarised
from foveakv.memory.segments import Segments

_SAMPLE = 64
"""Chunks from which the middle of a head's digests is found again."""
_ROOM = 4
"""A store that grows gets room for a quarter more chunks, so that n blocks do not copy it n times."""


def withdraw(store: ChunkStore, segments: Segments) -> Tensor:
    """Take the slots of chosen chunks from the segments; the store keeps its chunks.

    Returns the chunks that each head read, int64 [B, H] on the CPU, for `reserve` if nothing else is decided.
    """
    chosen = torch.zeros(store.batch * store.kv_heads, dtype=torch.int64)
    chosen[store._run.cpu()] = store._slots.cpu()
    if store.choosing and not store.in_place:
        first = torch.full((len(chosen),), segments.max_length, device=store.device)
        first[store._run] = store._offset
        last = torch.zeros_like(first)
        last[store._run] = store._offset + store._slots * store.chunk
        slot = torch.arange(segments.max_length, device=store.device)
        copies = (slot >= first[:, None]) & (slot < last[:, None])
        segments.keep(~copies.view(store.batch, store.kv_heads, -1))
    store.in_place = store.reserved = False
    with torch.inference_mode(False):
        store._digests = store._digests.take(store._digest, store.digests.shape[-1])
        store._digest = torch.arange(len(store._run), device=store.device)
        store._slots = torch.zeros_like(store._run)
        store._table = store._run.new_empty(len(store._run), 0)
        store._resident = torch.zeros_like(store._resident)
    store._outside = int(store._count.sum()) * store.chunk
    store._asked = 0
    return chosen.view(store.batch, store.kv_heads)


def complete(stored: Tensor, heads: Tensor, chunk: int) -> Tensor:
    """The tokens of complete chunks: bool [B, H, C], of stored [B, H, C] in heads [B, H]."""
    count = stored.sum(-1, keepdim=True) // chunk * chunk
    return stored & (stored.cumsum(-1) <= count) & heads[..., None]


def extend(
    store: ChunkStore,
    keys: Tensor,
    values: Tensor,
    stored: Tensor,
    positions: Tensor,
    heads: Tensor,
    directory: str | Path | None = None,
) -> int:
    """Add the complete chunks of what some heads store; withdrawn before. Returns the number of slots added.

    Args:
        store: its chunks stay as they are, bit for bit.
        keys, values: [B, H, C, D] and [B, H, C, Dv].
        stored: bool [B, H, C], the tokens that each head stores. Chunks are T of them, in column order.
        positions: int64 [B, C] or [B, H, C].
        heads: bool [B, H].
        directory: of the file, with place "disk": a new file is written, and the former one removed.

    StoreError: the file cannot be written.
    """
    chunk, kv_heads, device = store.chunk, store.kv_heads, store.device
    fresh = (stored.sum(-1) // chunk).masked_fill(~heads.to(device), 0).flatten().cpu()  # [B * H]
    old = torch.full_like(fresh, -1)
    old[store._run.cpu()] = torch.arange(len(store._run))
    run = ((fresh > 0) | (old >= 0)).nonzero()[:, 0]  # of every row from now on
    row, new = old[run], fresh[run]  # row: of the former ones, -1 for a head without
    before = _former(store._count, row)
    if not int(new.sum()):
        return 0
    order = real_first(stored).flatten(0, 1)  # [B * H, C]
    places = positions if positions.dim() == 3 else positions[:, None].expand(-1, kv_heads, -1)
    places = places.to(device).flatten(0, 1).gather(1, order)
    count, longest = before + new, int((before + new).max())
    start = _write(store, (keys, values), order, run, row, before, new, directory)
    exact = [_digests(store, store._keys, start + before, new, keys.shape[-1])]
    known = row >= 0
    with torch.inference_mode(False):
        spread = exact[0].new_zeros(len(run), exact[0].shape[1], longest)
        number = torch.arange(longest, device=device)
        is_new = (number >= before.to(device)[:, None]) & (number < count.to(device)[:, None])
        centre = _centres(store, exact[0], start, before, new, row, keys.shape[-1])
        inside = torch.arange(exact[0].shape[-1], device=device) < new.to(device)[:, None]
        spread.mT[is_new] = (exact[0] - centre[..., None]).mT[inside]
        if bool(known.any()):
            former = store._digests.restored(store._digest[row[known].to(device)])
            spread[known.to(device), :, : former.shape[-1]] += former.to(spread.dtype)
        store._digests = Digests.of_spread(spread, store._digests.kind, store._keys.dtype)
        table = torch.zeros(len(run), longest, chunk, dtype=torch.int32, device=device)
        if bool(known.any()):
            kept = store._positions[store._sequence[row[known].to(device)]]
            width = min(kept.shape[1], longest)
            table[known.to(device), :width] = kept[:, :width]
        most = int(new.max())
        added = places[run.to(device), : most * chunk].to(torch.int32).view(len(run), most, chunk)
        table[is_new] = added[inside]
        store._positions, store._sequence = table, torch.arange(len(run), device=device)
        store._digest = torch.arange(len(run), device=device)
        store._run, store._count, store._first = run.to(device), count.to(device), start.to(device)
        store._offset, store._slots = torch.zeros_like(store._run), torch.zeros_like(store._run)
        store._table = store._run.new_empty(len(run), 0)
        store._resident = torch.zeros(len(run), longest, dtype=torch.bool, device=device)
    store._outside = int(count.sum()) * chunk
    return int(new.sum()) * chunk


def _former(values: Tensor, row: Tensor) -> Tensor:
    """Values [n] of former rows, int64 on the CPU, 0 for rows that are new (-1)."""
    found = torch.zeros_like(row)
    found[row >= 0] = values.cpu()[row[row >= 0]]
    return found


def _write(
    store: ChunkStore,
    sources: tuple[Tensor, Tensor],
    order: Tensor,
    run: Tensor,
    row: Tensor,
    before: Tensor,
    new: Tensor,
    directory: str | Path | None,
) -> Tensor:
    """Write every row's new chunks after its former ones; return the first chunk of every row, int64 [n]."""
    chunk, count = store.chunk, before + new
    start = _former(store._first, row)
    room = None if store.room is None else _former(store.room, row)
    if room is not None and (bool((count > room).any()) or len(set(start.tolist())) < len(start)):
        room = None  # too little, or rows that share it
    own = room is not None
    if room is None:
        room = count if store.place == "disk" else count + count // _ROOM
    offset = start if own else room.cumsum(0) - room
    parts = []
    for source, former in zip(sources, (store._keys, store._values), strict=True):
        writer = None
        if not own:
            total = int(room.sum())
            writer = ChunkWriter(
                store.place, total, former.shape[1], source.new_empty(0, dtype=former.dtype), directory
            )
        for n, each in enumerate(run.tolist()):
            b, h = each // store.kv_heads, each % store.kv_heads
            tokens = source[b, h].index_select(0, order[each, : int(new[n]) * chunk])
            tokens = tokens.reshape(int(new[n]), former.shape[1]).to(former.dtype)
            at, held = int(start[n]), int(before[n])
            if writer is None:
                former[at + held : at + held + len(tokens)] = tokens
                continue
            writer.write(former[at : at + held])
            writer.write(tokens)
            writer.skip(int(room[n] - count[n]))
        parts.append(former if writer is None else writer.finish())
    store._keys, store._values = parts
    store.room = None if store.place == "disk" else room
    return offset


def _digests(store: ChunkStore, keys: Tensor, first: Tensor, count: Tensor, dim: int) -> Tensor:
    """Exact digests of count[i] chunks from first[i] on, [n, D or 2 D, longest], on the compute device."""
    exact = torch.float64 if keys.dtype == torch.float64 else torch.float32
    length = dim * (1 if store.summary == "mean" else 2)
    made = torch.zeros(len(first), length, int(count.max()), dtype=exact, device=store.device)
    for n, (at, many) in enumerate(zip(first.tolist(), count.tolist(), strict=True)):
        chunks = keys[at : at + many].to(store.device).view(many, store.chunk, dim).to(exact)
        made[n, :, :many] = summarised(chunks, store.summary).mT
    return made


def _centres(
    store: ChunkStore, exact: Tensor, start: Tensor, before: Tensor, new: Tensor, row: Tensor, dim: int
) -> Tensor:
    """What is subtracted from a row's digests, [n, D]: as before, and for new rows the middle of their channels."""
    inside = torch.arange(exact.shape[-1], device=exact.device) < new.to(exact.device)[:, None]
    high = exact.masked_fill(~inside[:, None], -torch.inf).amax(-1)
    low = exact.masked_fill(~inside[:, None], torch.inf).amin(-1)
    centre = torch.where(high >= low, (high + low) / 2, 0)
    if store._digests.kind == "model" and store._keys.dtype.itemsize > 2:
        return torch.zeros_like(centre)
    for n, (former, many) in enumerate(zip(row.tolist(), before.tolist(), strict=True)):
        if former >= 0:
            sample = _digests(store, store._keys, start[n : n + 1], torch.tensor([min(many, _SAMPLE)]), dim)
            centre[n] = store._digests.centre(sample, store._digest[former : former + 1])[0]
    return centre
