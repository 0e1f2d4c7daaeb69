"""The device code of the triton backend. Importing this file imports triton; only `triton_decode` does, when it runs.

In shapes: R = runs, S = splits of a run, n = G * q query rows that share a run (row i is query i % q of head i // q),
BLOCK_D and BLOCK_DV = powers of two that hold D and Dv. Scores are kept in base 2 (exp2 is what the hardware has).
KIND = 0: keys and values are numbers, 1: 8-bit levels, 2: 4-bit levels (see memory/quantizer.py). Levels enter the
products minus their middle, so that they fit 16-bit numbers. The query takes the scales of the key channels and every
score gets the query's product with their zeros; a weight takes the scale of its token's values, and weighted
zeros are summed on their own. With 4 bits there are two products, over even and over odd channels.
Triton takes annotations other than constexpr for types, so there are none.
"""

# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped"
import triton
import triton.language as tl


@triton.jit
def query_rows(
    query, batch, head, row, rows, q, stride_b, stride_h, stride_q, stride_d, d, D: tl.constexpr, UPCAST: tl.constexpr
):
    """Packed rows [ROWS, len(d)] of one run, read from the query in place; rows and dims beyond its shape are 0."""
    at = batch * stride_b + (head * (rows // q) + row // q) * stride_h + (row % q) * stride_q
    found = tl.load(
        query + at[:, None] + d[None, :] * stride_d, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0
    )
    return found.to(tl.float32) if UPCAST else found


@triton.jit
def level_rows(rows_q, key_scale, key_zero, run, d, D: tl.constexpr, KIND: tl.constexpr):
    """Rows for a product with levels minus their middle, and what to add to it, [ROWS]."""
    scale = tl.load(key_scale + run.to(tl.int64) * D + d, mask=d < D, other=0.0)
    zero = tl.load(key_zero + run.to(tl.int64) * D + d, mask=d < D, other=0.0)
    numbers = rows_q.to(tl.float32)
    middle = zero + scale * (128.0 if KIND == 1 else 8.0)
    return (numbers * scale[None, :]).to(rows_q.dtype), tl.sum(numbers * middle[None, :], 1)


@triton.jit
def run_query(
    query, key_scale, key_zero, run, batch, head, row, rows, q, stride_b, stride_h, stride_q, stride_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """What `tile_scores` needs of the query: rows, rows of the odd channels (4 bits only), and what to add."""
    if KIND == 0:
        d = tl.arange(0, BLOCK_D)
        even = query_rows(query, batch, head, row, rows, q, stride_b, stride_h, stride_q, stride_d, d, D, UPCAST)
        odd = even
        bias = tl.zeros_like(row).to(tl.float32)
    elif KIND == 1:
        d = tl.arange(0, BLOCK_D)
        even = query_rows(query, batch, head, row, rows, q, stride_b, stride_h, stride_q, stride_d, d, D, UPCAST)
        even, bias = level_rows(even, key_scale, key_zero, run, d, D, KIND)
        odd = even
    else:
        d = 2 * tl.arange(0, BLOCK_D // 2)
        even = query_rows(query, batch, head, row, rows, q, stride_b, stride_h, stride_q, stride_d, d, D, UPCAST)
        odd = query_rows(query, batch, head, row, rows, q, stride_b, stride_h, stride_q, stride_d, d + 1, D, UPCAST)
        even, bias = level_rows(even, key_scale, key_zero, run, d, D, KIND)
        odd, more = level_rows(odd, key_scale, key_zero, run, d + 1, D, KIND)
        bias += more
    return even, odd, bias


@triton.jit
def slot_rows(table, slot, visible, PAGE: tl.constexpr):
    """Rows of keys and values of a run's slots, from its first row on, or in all pages where there are any (PAGE)."""
    if PAGE == 0:
        found = slot
    else:
        page = tl.load(table + slot // PAGE, mask=visible, other=0)
        found = page.to(tl.int64) * PAGE + slot % PAGE
    return found


@triton.jit
def tile_scores(
    even, odd, bias, keys, slot, at, visible, stride_k, scale, mask, row_mask, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr, UPCAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Base-2 scores [ROWS, TILE] of a run's slots, -inf where not `visible` [TILE] or masked.

    at [TILE]: their rows (`slot_rows`). keys and mask point to what belongs to the run, so that offsets inside it fit
    32 bits; with pages, keys point to all of them and rows are 64 bits.
    """
    if KIND == 2:
        d = tl.arange(0, BLOCK_D // 2)
        pair = tl.load(
            keys + at[None, :] * stride_k + d[:, None], mask=visible[None, :] & (d < D // 2)[:, None], other=0
        ).to(tl.int32)
        scores = tl.dot(even, ((pair & 15) - 8).to(even.dtype), input_precision="ieee")
        scores = tl.dot(odd, ((pair >> 4) - 8).to(odd.dtype), scores, input_precision="ieee")
    else:
        d = tl.arange(0, BLOCK_D)
        k = tl.load(keys + at[None, :] * stride_k + d[:, None], mask=visible[None, :] & (d < D)[:, None], other=0)
        if KIND == 1:
            k = (k.to(tl.int32) - 128).to(even.dtype)
        elif UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(even, k, input_precision="ieee")
    if KIND > 0:
        scores += bias[:, None]
    scores *= scale
    allowed = visible[None, :]
    if HAS_MASK:
        seen = tl.load(mask + row_mask[:, None] + slot[None, :], mask=allowed, other=0)
        allowed = allowed & (seen != 0)
    return tl.where(allowed, scores, float("-inf"))


@triton.jit
def half_at(place, visible):
    """Little-endian float16 at any address, as float32."""
    low = tl.load(place, mask=visible, other=0).to(tl.uint16)
    high = tl.load(place + 1, mask=visible, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "split", "splits", "table_width", "stride_mb", "stride_mh", "stride_mq"])
def partial_attention(
    query, keys, values, key_scale, key_zero, start, length, table, mask, part_out, part_top, part_sum, scale,
    rows, q, heads, split, splits, table_width,
    stride_qb, stride_qh, stride_qq, stride_qd, stride_k, stride_v, stride_mb, stride_mh, stride_mq,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_MASK: tl.constexpr, UPCAST: tl.constexpr, KIND: tl.constexpr,
    PAGE: tl.constexpr,
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
    if PAGE == 0:
        first = tl.load(start + run)  # int64
        keys += first * stride_k
        values += first * stride_v
    else:
        table += run.to(tl.int64) * table_width
    batch = (run // heads).to(tl.int64)
    head = (run % heads).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    even, odd, bias = run_query(
        query, key_scale, key_zero, run, batch, head, row, rows, q, stride_qb, stride_qh, stride_qq, stride_qd,
        D, BLOCK_D, UPCAST, KIND,
    )  # fmt: skip
    mask += batch * stride_mb + head * stride_mh
    row_mask = (row % q) * stride_mq
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    PACK: tl.constexpr = 2 if KIND == 2 else 1  # numbers in an element of a row of values
    dv = tl.arange(0, BLOCK_DV // PACK)
    acc = tl.full([ROWS, BLOCK_DV // PACK], 0.0, tl.float32)
    if KIND > 0:
        zeros = tl.full([ROWS], 0.0, tl.float32)
    if KIND == 2:
        acc_odd = tl.full([ROWS, BLOCK_DV // PACK], 0.0, tl.float32)
    for begin in range(low, high, TILE):
        slot = begin + tl.arange(0, TILE)
        visible = slot < high
        at = slot_rows(table, slot, visible, PAGE)
        scores = tile_scores(
            even, odd, bias, keys, slot, at, visible, stride_k, scale, mask, row_mask, D, BLOCK_D, HAS_MASK, UPCAST,
            KIND,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - 0, not -inf + inf
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(
            values + at[:, None] * stride_v + dv[None, :],
            mask=visible[:, None] & (dv < DV // PACK)[None, :],
            other=0,
        )
        if KIND == 0:
            if UPCAST:
                v = v.to(tl.float32)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        else:
            tail = values + at * stride_v + DV // PACK
            step = half_at(tail, visible)
            zero = half_at(tail + 2, visible) + step * (128.0 if KIND == 1 else 8.0)
            zeros = zeros * shrink + tl.sum(weight * zero[None, :], 1)
            # The step is multiplied into the levels: small weights times small steps would underflow float16.
            weight = weight.to(even.dtype)
            level = v.to(tl.int32)
            if KIND == 1:
                levels = ((level - 128).to(tl.float32) * step[:, None]).to(weight.dtype)
                acc = tl.dot(weight, levels, acc * shrink[:, None], input_precision="ieee")
            else:
                even_levels = (((level & 15) - 8).to(tl.float32) * step[:, None]).to(weight.dtype)
                odd_levels = (((level >> 4) - 8).to(tl.float32) * step[:, None]).to(weight.dtype)
                acc = tl.dot(weight, even_levels, acc * shrink[:, None], input_precision="ieee")
                acc_odd = tl.dot(weight, odd_levels, acc_odd * shrink[:, None], input_precision="ieee")
        top = higher
    entry = (run.to(tl.int64) * splits + part) * rows + row
    tl.store(part_top + entry, top, mask=row < rows)
    tl.store(part_sum + entry, total, mask=row < rows)
    written = (row < rows)[:, None] & (dv < DV // PACK)[None, :]
    place = part_out + entry[:, None] * DV + dv[None, :] * PACK
    if KIND > 0:
        acc += zeros[:, None]
    tl.store(place, acc, mask=written)
    if KIND == 2:
        tl.store(place + 1, acc_odd + zeros[:, None], mask=written)


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


@triton.jit(do_not_specialize=["rows", "longest", "table_width", "stride_mb", "stride_mh", "stride_mq"])
def attention_sum(
    query, keys, key_scale, key_zero, start, length, table, mask, lse, attention_sum, scale, rows, q, heads, longest,
    table_width,
    stride_qb, stride_qh, stride_qq, stride_qd, stride_k, stride_mb, stride_mh, stride_mq,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_MASK: tl.constexpr, UPCAST: tl.constexpr, KIND: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Probabilities of a tile of slots, summed over all rows.

    Grid (R, tiles). Writes attention_sum [R, M], 0 beyond a run.
    """
    run = tl.program_id(0)
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    visible = slot < tl.load(length + run).to(tl.int32)
    if PAGE == 0:
        keys += tl.load(start + run) * stride_k
    else:
        table += run.to(tl.int64) * table_width
    at = slot_rows(table, slot, visible, PAGE)
    batch = (run // heads).to(tl.int64)
    head = (run % heads).to(tl.int64)
    mask += batch * stride_mb + head * stride_mh
    spent = tl.full([TILE], 0.0, tl.float32)
    for begin in range(0, rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        even, odd, bias = run_query(
            query, key_scale, key_zero, run, batch, head, row, rows, q, stride_qb, stride_qh, stride_qq, stride_qd,
            D, BLOCK_D, UPCAST, KIND,
        )  # fmt: skip
        row_mask = (row % q) * stride_mq
        scores = tile_scores(
            even,
            odd,
            bias,
            keys,
            slot,
            at,
            visible,
            stride_k,
            scale,
            mask,
            row_mask,
            D,
            BLOCK_D,
            HAS_MASK,
            UPCAST,
            KIND,
        )
        known = tl.load(lse + run.to(tl.int64) * rows + row, mask=row < rows, other=float("-inf"))
        base = tl.where(known == float("-inf"), 0.0, known * 1.4426950408889634)
        weight = tl.exp2(scores - base[:, None])
        spent += tl.sum(tl.where((row < rows)[:, None], weight, 0.0), 0)
    tl.store(attention_sum + run.to(tl.int64) * longest + slot, spent, mask=slot < longest)


INTERPRETED = not isinstance(partial_attention, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 when this was imported
