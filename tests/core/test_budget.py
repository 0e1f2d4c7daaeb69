"""Budgets are read as written, and the slots handed out never exceed them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveakv.core.allocation import allocate_heads
from foveakv.core.budget import Budget, Geometry, parse_budget
from foveakv.errors import BudgetError


def geometry(contexts=(100,), layers=2, kv_heads=4, head_dim=16, value_dim=16, itemsize=2):
    return Geometry(len(contexts), contexts, layers, kv_heads, head_dim, value_dim, itemsize)


@pytest.mark.parametrize(
    ("written", "kind", "value", "text"),
    [
        (0.1, "ratio", Fraction(1, 10), "10% of the prompt"),
        (1.0, "ratio", 1, "100% of the prompt"),
        ("10%", "ratio", Fraction(1, 10), "10% of the prompt"),
        (" 12.5 % ", "ratio", Fraction(1, 8), "12.5% of the prompt"),
        ("0.25", "ratio", Fraction(1, 4), "25% of the prompt"),
        ("1e-3", "ratio", Fraction(1, 1000), "0.1% of the prompt"),
        (".5", "ratio", Fraction(1, 2), "50% of the prompt"),
        ("100%", "ratio", 1, "100% of the prompt"),
        (1024, "tokens", 1024, "1024 tokens per head"),
        ("1024", "tokens", 1024, "1024 tokens per head"),
        (1, "tokens", 1, "1 tokens per head"),
        ("512MiB", "bytes", 512 * 2**20, "512MiB for the whole cache"),
        ("512 mib", "bytes", 512 * 2**20, "512 mib for the whole cache"),
        ("1.5GB", "bytes", 1_500_000_000, "1.5GB for the whole cache"),
        ("64KiB", "bytes", 65536, "64KiB for the whole cache"),
        ("900B", "bytes", 900, "900B for the whole cache"),
        (torch.tensor(7).item(), "tokens", 7, "7 tokens per head"),
    ],
)
def test_parse(written, kind, value, text):
    budget = parse_budget(written)
    assert (budget.kind, budget.value, str(budget)) == (kind, value, text)
    assert parse_budget(budget) is budget


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (0, "keeps nothing"),
        (-3, "keeps nothing"),
        (0.0, "keeps nothing"),
        (-0.1, "keeps nothing"),
        ("0%", "keeps nothing"),
        ("0MiB", "keeps nothing"),
        (1.5, r"1\.5 is over 100%; write 1\.0 for everything or an integer for tokens per head"),
        (1024.0, "is over 100%"),
        ("120%", "is over 100%"),
        ("1.5", "is over 100%"),
        (True, "bool"),
        (None, "NoneType"),
        ([0.1], "list"),
        (math.nan, "not a finite number"),
        (math.inf, "not a finite number"),
        ("nan", "cannot be read"),
        ("512XB", "unknown unit 'XB'"),
        ("512M", "unknown unit 'M'"),
        ("12 tokens", "unknown unit 'tokens'"),
        ("", "cannot be read"),
        ("ten", "cannot be read"),
        ("1..5", "cannot be read"),
        ("9" * 5000, "cannot be read"),
        ("1e999999999", "cannot be read"),
        ("99999999999999999999", "larger than any context"),
    ],
)
def test_parse_errors(written, message):
    with pytest.raises(BudgetError, match=message):
        parse_budget(written)


def test_numpy_scalars():
    np = pytest.importorskip("numpy")
    assert parse_budget(np.float64(0.1)) == Budget("ratio", Fraction(1, 10), "0.1")
    assert parse_budget(np.float32(0.5)).value == Fraction(1, 2)
    assert parse_budget(np.int64(9)).kind == "tokens"


def test_ratio_is_exact_and_rounds_down():
    assert parse_budget(0.29).tokens(geometry((100, 99, 1))).tolist() == [29, 28, 1]
    assert parse_budget(1.0).tokens(geometry((100, 3))).tolist() == [100, 3]
    assert parse_budget(1.0).full
    assert not parse_budget(0.99).full
    assert not parse_budget(1).full


def test_tokens_are_capped_at_the_prompt():
    assert parse_budget(50).tokens(geometry((100, 20))).tolist() == [50, 20]
    assert parse_budget(50).tokens(geometry((0,))).tolist() == [0]
    assert parse_budget(50).tokens(Geometry(2, torch.tensor([100, 20]), 1, 1, 1, 1, 1)).dtype == torch.int64


def test_slots_round_once():
    assert parse_budget(0.1).slots(geometry((15,))).tolist() == [12]  # 0.1 * 15 * 8, not 8 * floor(1.5)
    assert parse_budget(0.001).slots(geometry((15,))).tolist() == [8]
    assert parse_budget(4).slots(geometry((15,))).tolist() == [32]


def test_bytes_cover_the_whole_cache():
    g = geometry((100, 300))
    assert g.token_bytes == 8 * 32 * 2
    assert parse_budget(f"{g.token_bytes * 100}B").tokens(g).tolist() == [25, 75]
    assert parse_budget("1TiB").tokens(g).tolist() == [100, 300]
    tight = geometry((1, 1, 1000))
    assert parse_budget(f"{tight.token_bytes * 10}B").tokens(tight).tolist() == [1, 1, 8]
    with pytest.raises(BudgetError, match="one token per head"):
        parse_budget("100B").tokens(g)


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 10**6),
)
def test_bytes_never_exceed(contexts, layers, kv_heads, size):
    g = geometry(tuple(contexts), layers, kv_heads)
    if size < g.token_bytes * len(contexts):
        with pytest.raises(BudgetError):
            parse_budget(f"{size}B").tokens(g)
        return
    tokens = parse_budget(f"{size}B").tokens(g).tolist()
    assert sum(tokens) * g.token_bytes <= size or tokens == contexts
    assert all(1 <= n <= c for n, c in zip(tokens, contexts, strict=True))


def test_geometry_is_checked():
    with pytest.raises(BudgetError):
        Geometry(2, (1,), 1, 1, 1, 1, 1)
    with pytest.raises(BudgetError):
        Geometry(1, (-1,), 1, 1, 1, 1, 1)


# --- HybridKV's allocation ------------------------------------------------------------------------------------------


def test_equations_by_hand():
    scores = torch.tensor([[0.9, 1.0], [0.5, 0.4]])
    static = torch.tensor([[True, True], [False, False]])
    # Eq. 4: mean 100, B_dyn = ceil(0.75 * 100 * 2) = 150, B_stat = 250. Dynamic: 75 -> 64 each.
    # Eq. 5: 0.1 * 125 + 0.9 * 250 * S / 1.9 -> 119.07, 130.92; ceilings 120 + 131 = 251, one is trimmed
    got = allocate_heads(scores, static, 1000, 400)
    assert got.budgets.tolist() == [[119, 131], [64, 64]]
    assert (got.nominal, got.true, got.static, got.dynamic) == (401, 378, 250, 128)
    nearest = allocate_heads(scores, static, 1000, 600, rounding="nearest")  # B_dyn 225, 112.5 -> 128
    assert nearest.budgets[1].tolist() == [128, 128]
    assert nearest.true == 600
    spent = allocate_heads(scores, static, 1000, 400, spend_rest=True)
    assert spent.true == 400
    assert spent.budgets[1].tolist() == [64, 64]


def test_ablations():
    scores = torch.tensor([[0.9, 1.0], [0.5, 0.4]])
    static = torch.tensor([[True, True], [False, False]])
    flat = allocate_heads(scores, static, 1000, 512, head_level=False, type_level=False)
    assert flat.budgets.tolist() == [[128, 128], [128, 128]]
    assert allocate_heads(scores, static, 1000, 400, head_level=False).budgets[0].tolist() == [125, 125]
    all_static = allocate_heads(scores, torch.ones_like(static), 1000, 400)
    assert all_static.true == all_static.static == 400
    assert all_static.dynamic == 0
    all_dynamic = allocate_heads(scores, torch.zeros_like(static), 1000, 512)
    assert all_dynamic.budgets.tolist() == [[128, 128], [128, 128]]
    assert all_dynamic.static == 0


def test_cap_hands_the_rest_on():
    scores = torch.tensor([[1.0, 0.1, 0.1, 0.1]])
    static = torch.ones(1, 4, dtype=torch.bool)
    got = allocate_heads(scores, static, 100, 280, a=0.0, min_budget=1)
    assert got.budgets.tolist() == [[100, 60, 60, 60]]


def test_everything_fits():
    scores, static = torch.rand(3, 4), torch.rand(3, 4) > 0.5
    for context in (1, 7, 100):
        got = allocate_heads(scores, static, context, 12 * context)
        assert got.budgets.eq(context).all()
        assert allocate_heads(scores, static, context, 10**9).true == 12 * context


def test_too_small_for_the_minimum():
    scores, static = torch.tensor([[1.0, 0.0, 0.5, 0.5]]), torch.tensor([[True, True, False, False]])
    got = allocate_heads(scores, static, 1000, 48)
    assert got.minimum == 12
    assert got.true <= 48
    assert got.budgets.min() >= 8
    with pytest.raises(BudgetError, match="at least one"):
        allocate_heads(scores, static, 1000, 3)


def test_dynamic_heads_get_a_chunk_when_it_fits():
    scores, static = torch.ones(1, 4), torch.tensor([[True, True, False, False]])
    got = allocate_heads(scores, static, 1000, 36, min_budget=8)  # Eq. 4 alone: 13.5 for two, that is 4 each
    assert got.budgets.tolist() == [[10, 10, 8, 8]] or got.budgets[0, 2:].tolist() == [8, 8]


def test_large_rho_leaves_the_static_minimum():
    scores, static = torch.ones(1, 4), torch.tensor([[True, True, False, False]])
    got = allocate_heads(scores, static, 1000, 1000, rho=50.0, min_budget=20)
    assert got.budgets[0, :2].tolist() == [20, 20]
    assert got.budgets[0, 2:].tolist() == [256, 256]


def test_zero_scores_share_equally():
    got = allocate_heads(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), 1000, 300)
    assert got.budgets.tolist() == [[100, 100, 100]]


@pytest.mark.parametrize(
    "options",
    [{"rho": -1.0}, {"rho": math.nan}, {"a": 1.1}, {"min_budget": 0}, {"chunk": 0}, {"rounding": "up"}],
)
def test_bad_options(options):
    with pytest.raises(BudgetError):
        allocate_heads(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), 10, 10, **options)


def test_bad_scores():
    static = torch.ones(1, 2, dtype=torch.bool)
    for scores in (torch.tensor([[math.nan, 1.0]]), torch.tensor([[-1.0, 1.0]]), torch.ones(2, 2)):
        with pytest.raises(BudgetError):
            allocate_heads(scores, static, 10, 10)


heads = st.integers(1, 4).flatmap(
    lambda layers: st.integers(1, 4).flatmap(
        lambda n: st.tuples(
            st.lists(
                st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-300, 1e-9, 0.5, 1.0])),
                min_size=layers * n,
                max_size=layers * n,
            ).map(lambda v: torch.tensor(v, dtype=torch.float64).view(layers, n)),
            st.lists(st.booleans(), min_size=layers * n, max_size=layers * n).map(
                lambda v: torch.tensor(v).view(layers, n)
            ),
        )
    )
)


@settings(max_examples=400, deadline=None)
@given(
    heads=heads,
    context=st.integers(1, 3000),
    ratio=st.floats(0, 1.2),
    rho=st.sampled_from([0.0, 0.5, 0.75, 1.0, 3.0]),
    a=st.sampled_from([0.0, 0.1, 1.0]),
    min_budget=st.sampled_from([1, 8, 20, 32, 64]),
    rounding=st.sampled_from(["down", "nearest"]),
    head_level=st.booleans(),
    type_level=st.booleans(),
    spend_rest=st.booleans(),
)
def test_allocation_properties(heads, context, ratio, rho, a, min_budget, rounding, head_level, type_level, spend_rest):
    scores, static = heads
    n = scores.numel()
    total = max(n, int(ratio * n * context))
    options = {
        "min_budget": min_budget,
        "rounding": rounding,
        "head_level": head_level,
        "type_level": type_level,
        "spend_rest": spend_rest,
    }
    got = allocate_heads(scores, static, context, total, rho, a, **options)
    again = allocate_heads(scores, static, context, total, rho, a, **options)
    assert torch.equal(got.budgets, again.budgets)
    assert got.budgets.dtype == torch.int64
    assert got.budgets.shape == scores.shape
    assert got.true == int(got.budgets.sum()) <= total
    assert got.static + got.dynamic == got.true
    assert int(got.budgets.min()) >= 1
    assert int(got.budgets.max()) <= context
    wanted = min(min_budget, context)
    if n * wanted <= total:
        assert int(got.budgets.min()) >= wanted
    if total >= n * context:
        assert got.budgets.eq(context).all()
    if static.all() or (spend_rest and static.any() and got.budgets[static].min() < context):
        assert got.true == min(total, n * context)
    own, given_out = scores[static], got.budgets[static]
    higher = own[:, None] > own[None, :]
    assert (given_out[:, None] >= given_out[None, :])[higher].all()
    for b in set(got.budgets[~static].tolist()):
        assert b & (b - 1) == 0 or b in (context, wanted)


@settings(max_examples=400, deadline=None)
@given(
    heads=heads,
    context=st.integers(1, 3000),
    ratio=st.floats(0, 1.2),
    rho=st.sampled_from([0.0, 0.75, 1.0, 3.0]),
    step=st.sampled_from([1, 3, 4, 8, 32]),
    min_budget=st.sampled_from([1, 8, 32]),
    type_level=st.booleans(),
)
def test_whole_chunks_leave_less_than_a_chunk_unspent(heads, context, ratio, rho, step, min_budget, type_level):
    scores, static = heads
    n = scores.numel()
    total = max(n, int(ratio * n * context))
    chunk = context % step + step
    got = allocate_heads(
        scores, static, context, total, rho, min_budget=min_budget, chunk=chunk, step=step, rounding="chunks",
        type_level=type_level, spend_rest=True,
    )  # fmt: skip
    assert got.true == got.static + got.dynamic == int(got.budgets.sum()) <= min(total, n * context)
    assert int(got.budgets.min()) >= 1
    assert int(got.budgets.max()) <= context
    if n * min(min_budget, context) <= total:
        assert int(got.budgets.min()) >= min(min_budget, context)
    dynamic = got.budgets[~static]
    full = bool((got.budgets[static] == context).all())
    if not full:
        assert got.true == total
    elif len(dynamic) and total < n * context:
        # What is left is less than a chunk, or no head can hold one more.
        assert total - got.true < step or int(dynamic.min()) + step > context
