"""The device code of the triton backend. Importing this file imports triton; only `triton_decode` does, when it runs.

In shapes: R = runs, S = splits of a run, n = G * q query rows that share a run (row i is query i % q of head i // q),
BLOCK_D and BLOCK_DV = powers of two that hold D and Dv. Scores are kept in base 2 (exp2 is what the hardware has).
Annotations other than constexpr mean nothing to triton and would be taken for types, so there are none.
"""

# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped"
import triton
import triton.language as tl


@triton.jit
def query_rows(query, batch, head, row, rows, q, stride_b, stride_h, stride_q, stride_d, D: tl.constexpr, d):
    """Packed rows [ROWS, BLOCK_D] of one run, read where the queries lie; rows and dims that do not exist are 0."""
    at = batch * stride_b + (head * (rows // q) + row // q) * stride_h + (row % q) * stride_q
    return tl.load(
        query + at[:, None] + d[None, :] * stride_d, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0
    )


@triton.jit
def tile_scores(
    rows_q, keys, slot, visible, stride_k, d, scale, mask, row_mask, D: tl.constexpr,
    HAS_MASK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Base-2 scores [ROWS, TILE] of a run's slots, -inf where not `visible` [TILE] or masked.

    keys and mask point to what belongs to the run, so that offsets inside it fit 32 bits.
    """
    k = tl.load(keys + slot[None, :] * stride_k + d[:, None], mask=visible[None, :] & (d < D)[:, None], other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
    scores = tl.dot(rows_q, k, input_precision="ieee") * scale
    allowed = visible[None, :]
    if HAS_MASK:
        seen = tl.load(mask + row_mask[:, None] + slot[None, :], mask=allowed, other=0)
        allowed = allowed & (seen != 0)
    return tl.where(allowed, scores, float("-inf"))


@triton.jit(do_not_specialize=["rows", "split", "splits", "stride_mb", "stride_mh", "stride_mq"])
def partial_attention(
    query, keys, values, start, length, mask, part_out, part_top, part_sum, scale,
    rows, q, heads, split, splits,
    stride_qb, stride_qh, stride_qq, stride_qd, stride_k, stride_v, stride_mb, stride_mh, stride_mq,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_MASK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One split of one run: online softmax over its tiles.

    Grid (R, S, blocks of rows). Writes part_out [R, S, n, Dv] (not normalised), part_top and part_sum [R, S, n].
    Splits that begin beyond the run's end write nothing, and nothing reads them.
    """
    run = tl.program_id(0)
    part = tl.program_id(1)
    stored = tl.load(length + run).to(tl.int32)
    low = part * split
    if low >= stored:
        return
    high = tl.minimum(low + split, stored)
    first = tl.load(start + run)  # int64
    keys += first * stride_k
    values += first * stride_v
    batch = (run // heads).to(tl.int64)
    head = (run % heads).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    rows_q = query_rows(query, batch, head, row, rows, q, stride_qb, stride_qh, stride_qq, stride_qd, D, d)
    if UPCAST:
        rows_q = rows_q.to(tl.float32)
    mask += batch * stride_mb + head * stride_mh
    row_mask = (row % q) * stride_mq
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, BLOCK_DV], 0.0, tl.float32)
    for begin in range(low, high, TILE):
        slot = begin + tl.arange(0, TILE)
        visible = slot < high
        scores = tile_scores(rows_q, keys, slot, visible, stride_k, d, scale, mask, row_mask, D, HAS_MASK, UPCAST)
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - 0, not -inf + inf
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(
            values + slot[:, None] * stride_v + dv[None, :],
            mask=visible[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        if UPCAST:
            v = v.to(tl.float32)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    at = (run.to(tl.int64) * splits + part) * rows + row
    tl.store(part_top + at, top, mask=row < rows)
    tl.store(part_sum + at, total, mask=row < rows)
    tl.store(part_out + at[:, None] * DV + dv[None, :], acc, mask=(row < rows)[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["rows", "split", "splits"])
def merge_parts(
    part_out, part_top, part_sum, length, out, lse, rows, split, splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The splits of one row of one run, merged. Grid (R, n); writes out [R, n, Dv] and natural lse [R, n]."""
    run = tl.program_id(0)
    row = tl.program_id(1)
    count = (tl.load(length + run).to(tl.int32) + split - 1) // split
    origin = run.to(tl.int64) * splits
    dv = tl.arange(0, BLOCK_DV)
    top = float("-inf")
    total = 0.0
    acc = tl.full([BLOCK_DV], 0.0, tl.float32)
    for begin in range(0, count, PARTS):
        part = begin + tl.arange(0, PARTS)
        written = part < count
        at = (origin + part) * rows + row
        tops = tl.load(part_top + at, mask=written, other=float("-inf"))
        sums = tl.load(part_sum + at, mask=written, other=0.0)
        outs = tl.load(part_out + at[:, None] * DV + dv[None, :], mask=written[:, None] & (dv < DV)[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(tops - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight * sums, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * outs, 0)
        top = higher
    blind = total == 0.0  # an empty run, or a row that may attend to nothing
    norm = tl.where(blind, 1.0, total)
    at = run.to(tl.int64) * rows + row
    tl.store(out + at * DV + dv, tl.where(blind, 0.0, acc / norm), mask=dv < DV)
    tl.store(lse + at, tl.where(blind, float("-inf"), (top + tl.log2(norm)) * 0.6931471805599453))


@triton.jit(do_not_specialize=["rows", "longest", "stride_mb", "stride_mh", "stride_mq"])
def attention_mass(
    query, keys, start, length, mask, lse, mass, scale, rows, q, heads, longest,
    stride_qb, stride_qh, stride_qq, stride_qd, stride_k, stride_mb, stride_mh, stride_mq,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_MASK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Probabilities of a tile of slots, summed over all rows. Grid (R, tiles); writes mass [R, M], 0 beyond a run."""
    run = tl.program_id(0)
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    visible = slot < tl.load(length + run).to(tl.int32)
    keys += tl.load(start + run) * stride_k
    batch = (run // heads).to(tl.int64)
    head = (run % heads).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mask += batch * stride_mb + head * stride_mh
    spent = tl.full([TILE], 0.0, tl.float32)
    for begin in range(0, rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        rows_q = query_rows(query, batch, head, row, rows, q, stride_qb, stride_qh, stride_qq, stride_qd, D, d)
        if UPCAST:
            rows_q = rows_q.to(tl.float32)
        row_mask = (row % q) * stride_mq
        scores = tile_scores(rows_q, keys, slot, visible, stride_k, d, scale, mask, row_mask, D, HAS_MASK, UPCAST)
        known = tl.load(lse + run.to(tl.int64) * rows + row, mask=row < rows, other=float("-inf"))
        base = tl.where(known == float("-inf"), 0.0, known * 1.4426950408889634)
        weight = tl.exp2(scores - base[:, None])
        spent += tl.sum(tl.where((row < rows)[:, None], weight, 0.0), 0)
    tl.store(mass + run.to(tl.int64) * longest + slot, spent, mask=slot < longest)


INTERPRETED = not isinstance(partial_attention, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 when this was imported
