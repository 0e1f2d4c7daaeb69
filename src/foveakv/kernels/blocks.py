"""Decode attention from PyTorch's own attention, on any device and without a compiler.

The query heads that share a KV head are packed as rows, so that every key is read once and never repeated.

Uniform runs are dense views: one call. Ragged runs on a CPU: one call per run, in place; on several threads a run is
cut into equal strips, because a call spreads its batch over the threads and a single run would leave all but one idle.
(Copying runs together into one padded batch costs several times what reading them in place does.) Ragged runs on
other devices, where a launch per run is what costs: the flat buffer is seen as a regular grid of tiles; tiles that
lie inside one run are read in place, in one batched call, and the ends of the runs, which share a tile with a
neighbour or with slack, are gathered into a second one. Pieces of a run are merged by their log-sum-exp.

In shapes: n = G * q packed query rows, T = slots of a piece, P = pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foveakv.kernels.contract import Attended, precision, safe, share, value_dim
from foveakv.memory.segments import Runs, dense

# Ragged runs are copied into one padded batch while that is cheaper than more calls: on a CPU while the keys of a run
# take no more bytes than this, elsewhere up to this many slots.
PADDED_BYTES_CPU = 32 * 1024
PADDED_SLOTS = 1024
SHORTEST_STRIP = 256


def attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
) -> Attended:
    """See `foveakv.kernels.attend` for shapes."""
    if runs.codes is not None:  # decoded run by run
        found = attend_strips(query.to(precision(query)), runs, scaling, mask, need_attention_sum, need_lse, other_lse)
        return found._replace(out=found.out.to(query.dtype))
    if query.device.type != "cpu":
        few = runs.uniform or runs.max_length <= PADDED_SLOTS
        return (attend_whole if few else attend_tiles)(
            query, runs, scaling, mask, need_attention_sum, need_lse, other_lse
        )
    if runs.uniform:
        # One call gives every run to one thread; long runs on a machine with more threads than runs are cut.
        idle = torch.get_num_threads() > runs.batch * runs.heads and runs.max_length >= 4 * SHORTEST_STRIP
        whole = need_attention_sum or not idle
    else:
        whole = runs.max_length * runs.keys.shape[1] * runs.keys.element_size() <= PADDED_BYTES_CPU
    return (attend_whole if whole else attend_strips)(
        query, runs, scaling, mask, need_attention_sum, need_lse, other_lse
    )


def attend_whole(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
) -> Attended:
    """All runs in one call: dense views of uniform runs, a padded copy of ragged ones."""
    if runs.max_length == 0:
        return _nothing(query, runs, need_attention_sum, need_lse, other_lse)
    packed = _pack(query, runs.heads)
    keys, values, stored = (*dense(runs), None) if runs.uniform else _padded(runs)
    allowed = None if mask is None else _pack_mask(mask, packed.shape[2])
    if stored is not None:
        allowed = stored if allowed is None else allowed & stored
    other = None if other_lse is None else other_lse.reshape(packed.shape[:3])
    out, attention_sum, lse = _whole(packed, keys, values, scaling, allowed, need_attention_sum, need_lse, other)
    return Attended(
        out.reshape(*query.shape[:3], -1), attention_sum, None if lse is None else lse.reshape(query.shape[:3])
    )


def attend_strips(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
    *,
    threads: int | None = None,
    shortest: int = SHORTEST_STRIP,
) -> Attended:
    """One call per run, in place; with several threads up to two strips of a run for each, merged at the end."""
    if runs.max_length == 0:
        return _nothing(query, runs, need_attention_sum, need_lse, other_lse)
    packed = _pack(query, runs.heads)
    batch, heads, n, _ = packed.shape
    rows = packed.view(batch * heads, n, -1)
    out = query.new_zeros(batch * heads, n, value_dim(runs))
    attention_sum = (
        torch.zeros(len(rows), runs.max_length, dtype=precision(query), device=query.device)
        if need_attention_sum
        else None
    )
    lse = torch.full((len(rows), n), -torch.inf, dtype=precision(query), device=query.device) if need_lse else None
    other = None if other_lse is None else other_lse.reshape(batch * heads, n)
    if lse is not None and other is not None:
        lse.copy_(other)
    allowed = None
    if mask is not None:
        allowed = _pack_mask(mask, n).expand(batch, heads, -1, -1).reshape(batch * heads, -1, runs.max_length)
    threads = torch.get_num_threads() if threads is None else threads
    most = 1 if threads == 1 else 2 * threads
    strips: list[tuple[Tensor, Tensor]] = []
    owners: list[int] = []
    start, length = _on_host(runs)
    for run, (first, stored) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        if stored == 0:
            continue
        keys, values = runs.keys[first : first + stored], runs.values[first : first + stored]
        if runs.codes is not None:
            keys = runs.codes.decode_keys(keys, run).to(query.dtype)
            values = runs.codes.decode_values(values).to(query.dtype)
        visible = None if allowed is None else allowed[run, :, :stored]
        count = 1 if need_attention_sum else max(1, min(most, stored // shortest))
        if count == 1:
            # Four dimensions: with fewer, PyTorch falls back to a path that copies the keys.
            visible = None if visible is None else visible[None, None]
            beside = None if other is None else other[None, None, run]
            got, got_attention_sum, got_lse = _whole(
                rows[None, None, run], keys[None, None], values[None, None], scaling, visible,
                need_attention_sum, need_lse, beside,
            )  # fmt: skip
            out[run] = got[0, 0]
            if lse is not None and got_lse is not None:
                lse[run] = got_lse[0, 0]
            if attention_sum is not None and got_attention_sum is not None:
                attention_sum[run, :stored] = got_attention_sum[0, 0]
            continue
        size = stored // count
        for low, pieces, width in ((0, count, size), (count * size, 1, stored - count * size)):
            if width == 0:
                continue
            part = slice(low, low + pieces * width)
            seen = None if visible is None else visible[:, part].unflatten(1, (pieces, width)).transpose(0, 1)
            got, sums, _ = _piece(
                rows[run].expand(pieces, n, -1),
                keys[part].view(pieces, width, -1),
                values[part].view(pieces, width, -1),
                scaling,
                seen,
                False,
            )
            strips.append((got, sums))
            owners += [run] * pieces
    if strips:
        outs, sums = (torch.cat(parts) for parts in zip(*strips, strict=True))
        merged, merged_lse = _merge(outs, sums, torch.tensor(owners, device=query.device), len(rows))
        split = torch.tensor(sorted(set(owners)), device=query.device)
        if other is not None:
            portion, merged_lse = share(merged_lse, other)
            merged = merged * portion[..., None]
        out.index_copy_(0, split, merged[split].to(out.dtype))
        if lse is not None:
            lse.index_copy_(0, split, merged_lse[split].to(lse.dtype))
    if attention_sum is not None:
        attention_sum = attention_sum.view(batch, heads, -1)
    return Attended(out.view(*query.shape[:3], -1), attention_sum, None if lse is None else lse.view(query.shape[:3]))


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
    if runs.max_length == 0:
        return _nothing(query, runs, need_attention_sum, need_lse, other_lse)
    packed = _pack(query, runs.heads)
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
        out, lse, scores = _piece(rows[owner], pieces.keys, pieces.values, scaling, allowed, need_attention_sum)
        if pieces.used is not None:
            owner, slots, out, lse = (x.index_select(0, pieces.used) for x in (owner, slots, out, lse))
            scores = None if scores is None else scores.index_select(0, pieces.used)
        results.append((owner, slots, out, lse, scores))
    owners, _, outs, sums, _ = zip(*results, strict=True)
    out, lse = _merge(torch.cat(outs), torch.cat(sums), torch.cat(owners), total)
    if other_lse is not None:
        part, lse = share(lse, other_lse.reshape(lse.shape))
        out = out * part[..., None]
    attention_sum = None
    if need_attention_sum:
        flat = lse.new_zeros(total * runs.max_length)
        for owner, slots, _, _, scores in results:
            assert scores is not None  # asked for above
            probabilities = torch.exp(scores - safe(lse)[owner][..., None]).sum(1)  # [P, T]; padding adds exact zeros
            flat.index_add_(0, (owner[:, None] * runs.max_length + slots).view(-1), probabilities.view(-1))
        attention_sum = flat.view(batch, heads, runs.max_length)
    out = out.to(query.dtype).view(*query.shape[:3], -1)
    return Attended(out, attention_sum, lse.view(query.shape[:3]) if need_lse else None)


def _nothing(query: Tensor, runs: Runs, need_attention_sum: bool, need_lse: bool, other_lse: Tensor | None) -> Attended:
    """No run stores anything: zeros, and an empty attention sum."""
    attention_sum = torch.zeros(runs.batch, runs.heads, 0, dtype=precision(query), device=query.device)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=precision(query), device=query.device)
    if other_lse is not None:
        lse.copy_(other_lse)
    out = query.new_zeros(*query.shape[:3], value_dim(runs))
    return Attended(out, attention_sum if need_attention_sum else None, lse if need_lse else None)


def _pack(query: Tensor, heads: int) -> Tensor:
    """[B, H * G, q, D] -> contiguous [B, H, G * q, D]."""
    batch, query_heads, q, dim = query.shape
    return query.reshape(batch, heads, query_heads // heads * q, dim).contiguous()


def _on_host(runs: Runs) -> tuple[Tensor, Tensor]:
    """start [R] and length [R] on the CPU."""
    start = runs.start.cpu() if runs.start_host is None else runs.start_host
    length = runs.length.cpu() if runs.length_host is None else runs.length_host
    return start, length


def _pack_mask(mask: Tensor, n: int) -> Tensor:
    """[X, Y, q, M] -> [X, Y, n, M] in the row order of packed queries; one query needs no copy."""
    x, y, q, longest = mask.shape
    if q == 1:
        return mask
    return mask[:, :, None].expand(x, y, n // q, q, longest).reshape(x, y, n, longest)


def _padded(runs: Runs) -> tuple[Tensor, Tensor, Tensor]:
    """keys [B, H, M, D], values [B, H, M, Dv] and stored bool [B, H, 1, M], without touching slack.

    Padding repeats a run's last slot: masking its score is enough, while slack rows could be NaN and survive a zero
    weight. Runs of length 0 read some row of the buffer; they are fully masked and their output is overwritten.
    """
    shape = (runs.batch, runs.heads, runs.max_length)
    slots = torch.arange(runs.max_length, device=runs.keys.device)
    last = (runs.length[:, None] - 1).clamp_(min=0)
    start = runs.start[:, None].clamp(max=runs.keys.shape[0] - 1)
    rows = (torch.minimum(slots, last) + start).view(-1)
    keys = runs.keys.index_select(0, rows).view(*shape, -1)
    values = runs.values.index_select(0, rows).view(*shape, -1)
    return keys, values, (slots < runs.length[:, None]).view(runs.batch, runs.heads, 1, runs.max_length)


def _whole(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    allowed: Tensor | None,
    need_attention_sum: bool,
    need_lse: bool,
    other_lse: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention in one piece: query [B, H, n, D], keys [B, H, M, D], allowed bool, broadcastable to [B, H, n, M].

    other_lse [B, H, n] or None.

    Returns out [B, H, n, Dv], attention_sum [B, H, M] and log-sum-exp [B, H, n], the latter two where needed.
    """
    attention_sum = lse = None
    if (
        need_attention_sum
        or need_lse
        or other_lse is not None
        or (keys.device.type == "cpu" and keys.shape[-1] != values.shape[-1])
    ):  # no fused kernel for those
        scores = _scores(query, keys, scaling, allowed)
        probabilities = scores.softmax(-1)
        if allowed is not None:
            probabilities = probabilities.masked_fill(~allowed.any(-1, keepdim=True), 0)
        lse = scores.logsumexp(-1) if need_lse or other_lse is not None else None
        if lse is not None and other_lse is not None:
            part, lse = share(lse, other_lse)
            probabilities = probabilities * part[..., None]
        out = probabilities @ values.to(probabilities.dtype)
        attention_sum = probabilities.sum(-2) if need_attention_sum else None
    else:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=allowed, scale=scaling)
    if allowed is not None:
        out = out.masked_fill(~allowed.any(-1, keepdim=True), 0)
    return out.to(query.dtype), attention_sum, lse if need_lse else None


def _scores(query: Tensor, keys: Tensor, scaling: float, allowed: Tensor | None) -> Tensor:
    """Scaled scores [..., n, M] in float32 or float64, -inf where not allowed."""
    dtype = precision(query)
    scores = (query.to(dtype) * scaling) @ keys.to(dtype).transpose(-1, -2)
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _piece(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, allowed: Tensor | None, need_scores: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention over P pieces: query [P, n, D], keys [P, T, D], values [P, T, Dv], allowed [P, n or 1, T].

    Returns out [P, n, Dv], log-sum-exp [P, n] and, where needed, scores [P, n, T]. Rows that may attend to nothing
    have log-sum-exp -inf; their output is meaningless.
    """
    if query.device.type == "cpu" and query.shape[-1] == values.shape[-1] and not need_scores:
        bias = None
        if allowed is not None:
            bias = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill_(~allowed, -torch.inf)[:, None]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, None], keys[:, None], values[:, None], 0.0, False, attn_mask=bias, scale=scaling
        )
        out, lse = out[:, 0].to(precision(query)), lse.reshape(query.shape[:2])
        if allowed is not None:  # the call reports 0 for rows that see nothing
            lse = lse.masked_fill(~allowed.any(-1), -torch.inf)
        return out, lse, None
    scores = _scores(query, keys, scaling, allowed)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - safe(lse)[..., None]) @ values.to(scores.dtype)
    return out, lse, scores if need_scores else None


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
    start, length = _on_host(runs)
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
        # The whole stretch of the grid, so that it is a view; tiles that nobody owns entirely are not `used`.
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


def _merge(out: Tensor, lse: Tensor, owner: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Pieces out [P, n, Dv], lse [P, n] of run owner[P] -> out [R, n, Dv], lse [R, n]."""
    n = lse.shape[1]
    index = owner[:, None].expand(-1, n)
    top = lse.new_full((total, n), -torch.inf).scatter_reduce_(0, index, lse, "amax")
    weight = torch.exp(lse - safe(top)[owner])
    # where, not a product: rows that see nothing may hold NaN. A NaN that is stored has a NaN weight and gets through.
    parts = torch.where(weight[..., None] == 0, 0, out * weight[..., None])
    summed = out.new_zeros(total, n, out.shape[-1]).index_add_(0, owner, parts)
    norm = lse.new_zeros(total, n).index_add_(0, owner, weight)
    merged = torch.where(norm[..., None] == 0, 0, summed / norm[..., None])
    return merged, top + torch.log(norm)
