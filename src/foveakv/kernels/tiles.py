"""Attention over ragged runs in two batched calls, for devices where a launch per run is too expensive.

The flat buffer is seen as a regular grid of tiles. Tiles inside one run are read in place, in one call; the ends of
the runs, which share a tile with a neighbour or with slack, are gathered into a second one. The pieces of a run are
merged by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foveakv.kernels.contract import Attended, safe, share
from foveakv.kernels.packed import attend_pieces, merge, nothing, on_host, pack
from foveakv.memory.runs import Runs, contiguous


def attend_tiles(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
    *,
    tile: int | None = None,
) -> Attended:
    """Two batched calls whatever the number of runs: whole tiles in place, the ends of the runs gathered."""
    runs = contiguous(runs)
    if runs.max_length == 0:
        return nothing(query, runs, need_attention_sum, need_lse, other_lse)
    packed = pack(query, runs.heads)
    batch, heads, n, dim = packed.shape
    total = batch * heads
    rows = packed.view(total, n, dim)
    run_mask = None  # [R, q, M]
    if mask is not None:
        run_mask = mask.expand(batch, heads, -1, -1).reshape(total, *mask.shape[2:])
    results = []
    for pieces in _cut(runs, tile or _tile_size(runs)):
        allowed = pieces.stored
        if run_mask is not None:
            visible = _piece_mask(run_mask, pieces, n)
            allowed = visible if allowed is None else allowed & visible
        owner, slots = pieces.owner, pieces.slots
        out, lse, scores = attend_pieces(rows[owner], pieces.keys, pieces.values, scaling, allowed, need_attention_sum)
        if pieces.used is not None:
            owner, slots, out, lse = (x.index_select(0, pieces.used) for x in (owner, slots, out, lse))
            scores = None if scores is None else scores.index_select(0, pieces.used)
        results.append((owner, slots, out, lse, scores))
    owners, _, outs, sums, _ = zip(*results, strict=True)
    out, lse = merge(torch.cat(outs), torch.cat(sums), torch.cat(owners), total)
    if other_lse is not None:
        part, lse = share(lse, other_lse.reshape(lse.shape))
        out = out * part[..., None]
    attention_sum = None
    if need_attention_sum:
        flat = lse.new_zeros(total * runs.max_length)
        for owner, slots, _, _, scores in results:
            assert scores is not None  # requested above
            probabilities = torch.exp(scores - safe(lse)[owner][..., None]).sum(1)  # [P, T]; padding adds exact zeros
            flat.index_add_(0, (owner[:, None] * runs.max_length + slots).view(-1), probabilities.view(-1))
        attention_sum = flat.view(batch, heads, runs.max_length)
    out = out.to(query.dtype).view(*query.shape[:3], -1)
    return Attended(out, attention_sum, lse.view(query.shape[:3]) if need_lse else None)


def _tile_size(runs: Runs) -> int:
    """A power of two near a sixteenth of the mean run, so that the gathered ends stay a small part of the whole."""
    mean = runs.keys.shape[0] // (runs.batch * runs.heads)
    return max(64, min(1024, 1 << (mean // 16).bit_length()))


@dataclass
class _Pieces:
    """P equally long pieces of runs, to be attended to in one call."""

    owner: Tensor  # [P] run of every piece
    slots: Tensor  # [P, T] slot numbers inside that run
    keys: Tensor  # [P, T, D]
    values: Tensor  # [P, T, Dv]
    stored: Tensor | None  # bool [P, 1, T], None = all
    used: Tensor | None  # indices of the pieces that count, None = all


def _cut(runs: Runs, tile: int) -> list[_Pieces]:
    """Every stored slot in exactly one piece: whole tiles of the grid in place, the ends of the runs gathered."""
    device = runs.keys.device
    start, length = on_host(runs)
    first = (start + tile - 1) // tile  # run r owns tiles first[r] .. first[r] + whole[r] - 1 entirely
    whole = ((start + length) // tile - first).clamp_(min=0)
    covered = whole * tile
    head = torch.where(whole > 0, first * tile - start, length)  # slots before the first whole tile
    rest = length - covered
    count, width = int(whole.sum()), int(rest.max())
    parts = []
    if count:
        owner = torch.repeat_interleave(whole, output_size=count)
        number = torch.arange(count) + (first - (whole.cumsum(0) - whole))[owner]
        # A contiguous range, so that no copy is made; tiles shared by runs are not `used`.
        low, high = int(number[0]), int(number[-1]) + 1
        used = number - low
        owners = torch.zeros(high - low, dtype=torch.int64).index_copy_(0, used, owner)
        origin = torch.arange(low, high) * tile - start[owners]  # the slot in a tile's first row
        slots = origin.to(device)[:, None] + torch.arange(tile, device=device)
        rows = slice(low * tile, high * tile)
        parts.append(
            _Pieces(
                owners.to(device),
                slots.clamp_(0, runs.max_length - 1),
                runs.keys[rows].view(high - low, tile, -1),
                runs.values[rows].view(high - low, tile, -1),
                None,
                used.to(device) if count < high - low else None,
            )
        )
    if width:
        numbers = torch.stack([head, rest, covered, length, start]).to(device)  # one transfer
        head, rest, covered, length, start = numbers[:, :, None].unbind(0)
        column = torch.arange(width, device=device)
        slots = column + torch.where(column < head, 0, covered)
        slots = torch.minimum(slots, (length - 1).clamp_(min=0))  # padding repeats a stored slot, see _padded
        index = (slots + start).clamp_(max=runs.keys.shape[0] - 1).view(-1)
        parts.append(
            _Pieces(
                torch.arange(runs.start.shape[0], device=device),
                slots,
                runs.keys.index_select(0, index).view(-1, width, runs.keys.shape[1]),
                runs.values.index_select(0, index).view(-1, width, runs.values.shape[1]),
                (column < rest)[:, None],
                None,
            )
        )
    return parts


def _piece_mask(run_mask: Tensor, pieces: _Pieces, n: int) -> Tensor:
    """run_mask [R, q, M] at the slots of the pieces -> [P, n, T] in the row order of packed queries."""
    found = run_mask[pieces.owner[:, None], :, pieces.slots].transpose(1, 2)  # [P, q, T]
    count, q, width = found.shape
    return found[:, None].expand(count, n // q, q, width).reshape(count, n, width)
