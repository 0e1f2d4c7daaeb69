"""The device code of `triton_columns`. Importing this file imports triton; only `triton_columns` does, when it runs.

Query rows are packed token by token: packed row r is query head r % G of the group at token r // G, so that the rows of
a block see about the same columns. Scores are kept in base 2 (exp2 is what the hardware has).
Triton takes annotations other than constexpr for types, so there are none.
"""

# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped"
import triton
import triton.language as tl


@triton.jit
def row_block(
    query, rows, stop, batch, head, row, tokens, stride_b, stride_h, stride_c, stride_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Packed rows [ROWS, BLOCK_D], read from the query in place, and how many first columns each may see."""
    token = row // GROUP
    inside = token < tokens
    place = batch * tokens + token
    reach = tl.load(stop + place, mask=inside, other=0).to(tl.int32)
    column = tl.load(rows + place, mask=inside & (reach > 0), other=0)  # int64
    d = tl.arange(0, BLOCK_D)
    at = batch * stride_b + (head * GROUP + row % GROUP) * stride_h + column * stride_c
    found = tl.load(
        query + at[:, None] + d[None, :] * stride_d, mask=(reach > 0)[:, None] & (d < D)[None, :], other=0.0
    )
    return found.to(tl.float32) if UPCAST else found, reach


@triton.jit
def key_block(keys, column, columns, stride_c, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):
    """Keys of a block of columns, transposed: [BLOCK_D, TILE]."""
    d = tl.arange(0, BLOCK_D)
    found = tl.load(
        keys + column[None, :] * stride_c + d[:, None] * stride_d,
        mask=(column < columns)[None, :] & (d < D)[:, None], other=0.0,
    )  # fmt: skip
    return found.to(tl.float32) if UPCAST else found


@triton.jit
def visible_block(mask, token, column, reach, stride_token, HAS_MASK: tl.constexpr):
    """Which of a block of columns each row sees: bool [ROWS, TILE]. mask points to the sequence's."""
    allowed = column[None, :] < reach[:, None]
    if HAS_MASK:
        seen = tl.load(mask + token[:, None] * stride_token + column[None, :], mask=allowed, other=0)
        allowed = allowed & (seen != 0)
    return allowed


@triton.jit(do_not_specialize=["heads", "tokens", "columns", "stride_mb", "stride_mt"])
def row_lse(
    query, keys, rows, stop, mask, lse, scale, heads, tokens, columns,
    stride_qb, stride_qh, stride_qc, stride_qd, stride_kb, stride_kh, stride_kc, stride_kd, stride_mb, stride_mt,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HAS_MASK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp of every row's scores over the columns that it sees; -inf where it sees none.

    Grid (B * H, blocks of packed rows). Writes lse [B * H, n * G]. The last rows, which see most, start first.
    """
    run = tl.program_id(0)
    batch = (run // heads).to(tl.int64)
    head = (run % heads).to(tl.int64)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    q, reach = row_block(
        query, rows, stop, batch, head, row, tokens, stride_qb, stride_qh, stride_qc, stride_qd,
        D, BLOCK_D, GROUP, UPCAST,
    )  # fmt: skip
    keys += batch * stride_kb + head * stride_kh
    mask += batch * stride_mb
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    for begin in range(0, tl.max(reach, 0), TILE):
        column = begin + tl.arange(0, TILE)
        k = key_block(keys, column, columns, stride_kc, stride_kd, D, BLOCK_D, UPCAST)
        allowed = visible_block(mask, row // GROUP, column, reach, stride_mt, HAS_MASK)
        scores = tl.where(allowed, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - 0, not -inf + inf
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        top = higher
    blind = total == 0.0
    found = tl.where(blind, float("-inf"), top + tl.log2(tl.where(blind, 1.0, total)))
    tl.store(lse + run.to(tl.int64) * tokens * GROUP + row, found, mask=row // GROUP < tokens)


@triton.jit(do_not_specialize=["heads", "tokens", "columns", "stride_mb", "stride_mt"])
def add_columns(
    query, keys, rows, stop, mask, lse, sums, scale, heads, tokens, columns,
    stride_qb, stride_qh, stride_qc, stride_qd, stride_kb, stride_kh, stride_kc, stride_kd, stride_mb, stride_mt,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HAS_MASK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """sums [B, H, C] += the probabilities of a block of columns, summed over all rows: no two programs share a column.

    Grid (B * H, blocks of columns). lse: what `row_lse` wrote. The first columns, which most rows see, start first.
    """
    run = tl.program_id(0)
    batch = (run // heads).to(tl.int64)
    head = (run % heads).to(tl.int64)
    first = tl.program_id(1) * TILE
    column = first + tl.arange(0, TILE)
    keys += batch * stride_kb + head * stride_kh
    mask += batch * stride_mb
    lse += run.to(tl.int64) * tokens * GROUP
    k = key_block(keys, column, columns, stride_kc, stride_kd, D, BLOCK_D, UPCAST)
    total = tl.full([TILE], 0.0, tl.float32)
    for begin in range(0, tokens * GROUP, ROWS):
        row = begin + tl.arange(0, ROWS)
        token = row // GROUP
        furthest = tl.load(stop + batch * tokens + token, mask=token < tokens, other=0)
        if tl.max(furthest, 0) > first:  # else no row of this block sees these columns
            q, reach = row_block(
                query, rows, stop, batch, head, row, tokens, stride_qb, stride_qh, stride_qc, stride_qd,
                D, BLOCK_D, GROUP, UPCAST,
            )  # fmt: skip
            known = tl.load(lse + row, mask=token < tokens, other=float("-inf"))
            base = tl.where(known == float("-inf"), 0.0, known)
            allowed = visible_block(mask, token, column, reach, stride_mt, HAS_MASK)
            scores = tl.dot(q, k, input_precision="ieee") * scale
            # Weights are masked, not scores: -inf minus the NaN of a spoilt row would reach columns that it cannot see.
            total += tl.sum(tl.where(allowed, tl.exp2(scores - base[:, None]), 0.0), 0)
    place = sums + run.to(tl.int64) * columns + column
    before = tl.load(place, mask=column < columns, other=0.0)
    tl.store(place, before + total, mask=column < columns)


INTERPRETED = not isinstance(row_lse, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 when this was imported
