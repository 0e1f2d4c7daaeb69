"""Attention statistics equal what eager softmax over the whole C x C matrix gives, without making that matrix."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foveakv.core.attention_stats import (
    attention_rows,
    column_sums,
    head_mean_stats,
    last_rows,
    sparsity,
    text_rows,
    topk_attention,
    window_scores,
)
from foveakv.core.prompt import AUDIO, IMAGE, PAD, TEXT, PromptMap
from foveakv.errors import InputError

B, H, G, C, D = 3, 2, 3, 37, 8
SCALING = D**-0.5
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def layer(dtype=torch.float32, batch=B, columns=C, heads=H, group=G, seed=0):
    g = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(batch, heads * group, columns, D, generator=g, dtype=torch.float64)
    keys = torch.randn(batch, heads, columns, D, generator=g, dtype=torch.float64)
    return query.to(dtype), keys.to(dtype)


def eager(query, keys, mask):
    """[B, H, G, C, C] probabilities; mask bool [B, C, C]."""
    batch, heads, columns, _ = keys.shape
    repeated = keys.double().repeat_interleave(query.shape[1] // heads, 1)
    logits = query.double() @ repeated.mT * SCALING
    probs = logits.masked_fill(~mask[:, None], -torch.inf).softmax(-1).nan_to_num(0)
    return probs.view(batch, heads, -1, columns, columns)


def causal(columns=C, batch=B):
    return torch.ones(columns, columns, dtype=torch.bool).tril().expand(batch, -1, -1)


def masks():
    """name -> (mask [B, C, C], real [B, C])"""
    real = torch.ones(B, C, dtype=torch.bool)
    left, right = real.clone(), real.clone()
    left[1, :5], left[2, :20] = False, False
    right[1, -5:], right[2, -20:] = False, False
    window = causal() & ~causal().tril(-7)
    block = causal().clone()
    block[:, 4:12, 4:12] = True
    return {
        "causal": (causal(), real),
        "left": (causal() & left[:, None], left),
        "right": (causal() & right[:, None], right),
        "sliding": (window, real),
        "image block": (block, real),
    }


def lookup(mask):
    return lambda rows: mask.gather(1, rows[..., None].expand(-1, -1, mask.shape[-1]))[:, None]


@pytest.fixture(params=list(masks()))
def case(request):
    return masks()[request.param]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request):
    return request.param


@pytest.fixture(params=[1, 4000, None], ids=["row", "tile", "whole"])
def tile_bytes(request):
    return request.param


def some_rows(real, n=11, seed=1):
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, C, (B, n), generator=g).sort(1).values
    valid = real.gather(1, rows) & (torch.rand(B, n, generator=g) < 0.8)
    return rows, valid


def picked(probs, rows, valid):
    """[B, H, G, n, C] of eager's, rows that do not count 0."""
    index = rows[:, None, None, :, None].expand(-1, *probs.shape[1:3], -1, probs.shape[-1])
    return probs.gather(3, index) * valid[:, None, None, :, None]


def test_attention_rows(case, dtype, tile_bytes):
    mask, real = case
    query, keys = layer(dtype)
    rows, valid = some_rows(real)
    got = attention_rows(query, keys, rows, SCALING, lookup(mask), valid, tile_bytes=tile_bytes)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), picked(eager(query, keys, mask), rows, valid), rtol=0, atol=TOLERANCE[dtype]
    )
    torch.testing.assert_close(
        attention_rows(query, keys, rows, SCALING, None, tile_bytes=tile_bytes).double(),
        picked(eager(query, keys, causal()), rows, torch.ones_like(valid)),
        rtol=0,
        atol=TOLERANCE[dtype],
    )


def test_column_sums(case, dtype, tile_bytes):
    mask, real = case
    query, keys = layer(dtype)
    rows, valid = some_rows(real)
    got = column_sums(query, keys, rows, valid, SCALING, lookup(mask), tile_bytes=tile_bytes)
    want = picked(eager(query, keys, mask), rows, valid).sum((2, 3))
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_column_sums_of_all_rows(dtype):
    query, keys = layer(dtype)
    rows = torch.arange(C).expand(B, C)
    got = column_sums(query, keys, rows, None, SCALING, tile_bytes=5000)
    want = eager(query, keys, causal()).sum((2, 3))
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(got.sum(), torch.tensor(float(B * H * G * C), dtype=dtype))


def test_head_mean_stats(case, dtype, tile_bytes):
    mask, real = case
    query, keys = layer(dtype)
    rows, valid = some_rows(real)
    got = head_mean_stats(query, keys, rows, valid, SCALING, lookup(mask), tile_bytes=tile_bytes)
    mean = picked(eager(query, keys, mask), rows, valid).mean((1, 2))
    assert torch.equal(got.counts, valid.sum(1))
    for b in range(B):
        own = mean[b, valid[b]] if valid[b].any() else torch.zeros(1, C, dtype=torch.float64)
        tolerance = {"rtol": 0, "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(got.sums[b].double(), own.sum(0), **tolerance)
        torch.testing.assert_close(got.maxima[b].double(), own.amax(0), **tolerance)
        torch.testing.assert_close(got.variance[b].double(), own.var(0, correction=0), **tolerance)


def test_topk_attention(case, dtype, tile_bytes):
    mask, real = case
    query, keys = layer(dtype)
    rows, valid = some_rows(real)
    k = [1, 4, C + 5]
    got = topk_attention(query, keys, rows, valid, SCALING, lookup(mask), torch.tensor(k), tile_bytes=tile_bytes)
    probs = picked(eager(query, keys, mask), rows, valid).sort(-1, descending=True).values
    for b in range(B):
        want = probs[b, ..., : k[b]].sum((1, 2, 3)) / max(1, int(valid[b].sum())) / G
        torch.testing.assert_close(got[b].double(), want, rtol=0, atol=TOLERANCE[dtype])
    assert (got <= 1 + 1e-5).all()


def test_topk_of_everything_is_one():
    query, keys = layer()
    rows = torch.arange(C).expand(B, C)
    assert torch.allclose(topk_attention(query, keys, rows, None, SCALING, None, C), torch.ones(B, H))
    with pytest.raises(InputError):
        topk_attention(query, keys, rows, None, SCALING, None, 0)
    with pytest.raises(InputError):
        topk_attention(query, keys, rows, None, SCALING, None, [1, 2])


@pytest.mark.parametrize("window", [1, 6, C, 100])
def test_window_scores(case, dtype, tile_bytes, window):
    mask, real = case
    query, keys = layer(dtype)
    got = window_scores(query, keys, window, SCALING, lookup(mask), real, tile_bytes=tile_bytes)
    probs = eager(query, keys, mask)
    for b in range(B):
        own = real[b].nonzero().flatten()[-window:]
        torch.testing.assert_close(got[b].double(), probs[b][:, :, own].mean((1, 2)), rtol=0, atol=TOLERANCE[dtype])
        assert got[b][:, ~real[b]].eq(0).all()
    total = torch.ones(B, H, dtype=dtype)
    torch.testing.assert_close(got.sum(-1), total)


def test_a_padded_row_scores_as_it_does_alone():
    query, keys = layer(torch.float64)
    mask, real = masks()["left"]
    got = window_scores(query, keys, 6, SCALING, lookup(mask), real)
    alone = window_scores(query[2:, :, 20:], keys[2:, :, 20:], 6, SCALING)
    torch.testing.assert_close(got[2:, :, 20:], alone)


def test_sparsity(case, tile_bytes):
    mask, real = case
    query, keys = layer(torch.float64)
    rows, valid = some_rows(real)
    visual = torch.zeros(B, C, dtype=torch.bool)
    visual[:, 3:15] = True
    never = torch.zeros(B, C, dtype=torch.bool)
    got = sparsity(
        query, keys, rows, valid, SCALING, lookup(mask), (visual, ~visual, never), threshold=1e-2, tile_bytes=tile_bytes
    )
    probs = picked(eager(query, keys, mask), rows, valid)
    pairs = mask.gather(1, rows[..., None].expand(-1, -1, C)) & valid[..., None]
    for i, columns in enumerate((visual, ~visual)):
        both = (pairs & columns[:, None])[:, None, None].expand_as(probs)
        small = ((probs <= 1e-2) & both).sum((1, 2, 3, 4))
        want = small.double() / both.sum((1, 2, 3, 4)).clamp_min(1)
        torch.testing.assert_close(got[i], want, rtol=0, atol=1e-12)
    assert got[2].eq(0).all()
    # App. A.1, Eq. 7: the divisor is every pair; what the mask hides is 0
    counted = valid[:, None, None, :, None]
    for i, share in enumerate(
        sparsity(
            query, keys, rows, valid, SCALING, lookup(mask), (visual, ~visual, never), threshold=1e-2, per="all",
            tile_bytes=tile_bytes,
        )
    ):  # fmt: skip
        every = (counted & (visual, ~visual, never)[i][:, None, None, None]).expand_as(probs)
        small = ((probs <= 1e-2) & every).sum((1, 2, 3, 4))
        torch.testing.assert_close(share, small.double() / every.sum((1, 2, 3, 4)).clamp_min(1), rtol=0, atol=1e-12)


def test_rows_that_do_not_count_leak_nothing():
    query, keys = layer()
    mask, real = masks()["left"]
    query = query.masked_fill(~real[:, None, :, None], torch.nan)
    keys = keys.masked_fill(~real[:, None, :, None], torch.nan)
    rows = torch.arange(C).expand(B, C)
    visible = lookup(mask)
    assert attention_rows(query, keys, rows, SCALING, visible, real).isfinite().all()
    for values in (
        column_sums(query, keys, rows, real, SCALING, visible),
        *head_mean_stats(query, keys, rows, real, SCALING, visible),
        topk_attention(query, keys, rows, real, SCALING, visible, 5),
        window_scores(query, keys, C, SCALING, visible, real),
        sparsity(query, keys, rows, real, SCALING, visible, (real,)),
    ):
        assert values.isfinite().all()


def test_no_rows_at_all():
    query, keys = layer()
    none = torch.zeros(B, 0, dtype=torch.int64)
    off = torch.zeros(B, 4, dtype=torch.bool)
    for rows, valid in ((none, None), (torch.zeros(B, 4, dtype=torch.int64), off)):
        assert topk_attention(query, keys, rows, valid, SCALING, None, 3).eq(0).all()
        assert column_sums(query, keys, rows, valid, SCALING).eq(0).all()
        stats = head_mean_stats(query, keys, rows, valid, SCALING)
        assert all(values.eq(0).all() for values in stats)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile_bytes", [600, None])
def test_low_precision_is_widened(low, tile_bytes):
    query, keys = layer(low)
    got = window_scores(query, keys, 6, SCALING, tile_bytes=tile_bytes)
    assert got.dtype == torch.float32
    want = window_scores(query.double(), keys.double(), 6, SCALING)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(window_scores(query, keys, 6, SCALING, tile_bytes=tile_bytes), got)


@pytest.mark.parametrize("group", [1, 4])
def test_transposed_storage_and_gradients(group):
    query, keys = layer(torch.float64, group=group)
    base = query.transpose(1, 2).contiguous().requires_grad_(), keys.transpose(1, 2).contiguous().requires_grad_()
    got = window_scores(base[0].transpose(1, 2), base[1].transpose(1, 2), 6, SCALING)
    assert not got.requires_grad
    torch.testing.assert_close(got, window_scores(query, keys, 6, SCALING))


def test_shapes_are_checked():
    query, keys = layer()
    rows = torch.zeros(B, 2, dtype=torch.int64)
    with pytest.raises(InputError, match="one layer"):
        column_sums(query[:, :5], keys, rows, None, SCALING)
    with pytest.raises(InputError, match="rows and valid"):
        column_sums(query, keys, rows[:2], None, SCALING)
    with pytest.raises(InputError, match="rows and valid"):
        column_sums(query, keys, rows, torch.ones(B, 3, dtype=torch.bool), SCALING)
    with pytest.raises(InputError, match="window"):
        window_scores(query, keys, 0, SCALING)


class _Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
def test_no_large_tensor_at_16k(low):
    columns, heads, group, dim = 16384, 4, 2, 2
    query = torch.randn(1, heads * group, columns, dim).to(low)
    keys = torch.randn(1, heads, columns, dim).to(low)
    rows = torch.arange(0, columns, 128)[None]
    limit = 2**21
    with _Largest() as watch:
        column_sums(query, keys, rows, None, 1.0, tile_bytes=limit)
        head_mean_stats(query, keys, rows, None, 1.0, tile_bytes=limit)
        topk_attention(query, keys, rows[:, -16:], None, 1.0, None, columns // 20, tile_bytes=limit)
        window_scores(query, keys, 32, 1.0, tile_bytes=limit)
    # a view reports the storage of what it looks into: the inputs are the floor
    inputs = query.untyped_storage().nbytes()
    assert watch.bytes <= max(limit, inputs) < columns * columns // 64


# --- which rows -----------------------------------------------------------------------------------------------------


def test_last_rows():
    real = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    rows, valid = last_rows(real, 3)
    assert [r[v].tolist() for r, v in zip(rows, valid, strict=True)] == [[2, 3, 4], [2, 3, 4], [0, 1], []]
    assert last_rows(real, 99)[0].shape == (4, 5)


def prompt(*rows):
    return PromptMap(torch.tensor(rows, dtype=torch.int8))


def chosen(*args, **kwargs):
    rows, valid = text_rows(*args, **kwargs)
    return [r[v].tolist() for r, v in zip(rows, valid, strict=True)]


def test_text_rows_stand_after_the_first_visual_token():
    p = prompt(
        [TEXT, TEXT, IMAGE, IMAGE, TEXT, TEXT],
        [PAD, IMAGE, TEXT, IMAGE, TEXT, AUDIO],
        [TEXT, TEXT, TEXT, IMAGE, IMAGE, IMAGE],  # nothing follows the image: all its text
        [TEXT, TEXT, TEXT, TEXT, PAD, PAD],
        [IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE],
    )
    assert chosen(p) == [[4, 5], [2, 4], [0, 1, 2], [0, 1, 2, 3], []]
    assert chosen(p, after_first_visual=False) == [[0, 1, 4, 5], [2, 4], [0, 1, 2], [0, 1, 2, 3], []]


@pytest.mark.parametrize("limit", [1, 2, 3, 16, 64, 99, 100, 101, None])
def test_text_rows_are_spread(limit):
    (rows,) = chosen(prompt([IMAGE] + [TEXT] * 100), max_rows=limit)
    assert len(rows) == min(100, limit or 100)
    assert rows == sorted(set(rows))
    assert rows[-1] == 100
    if limit == 64:
        assert rows[-16:] == list(range(85, 101))
        assert rows[0] == 1
        assert max(b - a for a, b in itertools.pairwise(rows)) <= 2
    with pytest.raises(InputError):
        text_rows(prompt([TEXT]), max_rows=0)
