"""Codes against plain arithmetic: how far a number is from what its code stands for, and what odd numbers become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foveakv.errors import MethodError
from foveakv.memory import quantizer as module
from foveakv.memory.quantizer import Quantizer

KINDS = ["int8", "int4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EPS = 2.0**-22  # rounding of the float32 arithmetic around the levels, relative to the largest number


def of(kind: str, keys: Tensor, values: Tensor, real: Tensor | None = None) -> Quantizer:
    return Quantizer.of_prompt(kind, keys, values.shape[-1], real)


def flat(keys: Tensor) -> Tensor:
    """[B, H, n, D] -> [R, n, D]."""
    return keys.flatten(0, 1)


def every_run(quantizer: Quantizer, rows: Tensor) -> Tensor:
    """Decoded keys of rows [R, n, K]."""
    return quantizer.dequantize_keys(rows, torch.arange(len(rows))[:, None])


def plain_decode(quantizer: Quantizer, rows: Tensor, run: int) -> tuple[np.ndarray, np.ndarray]:
    """The format in words of one byte each: levels [n, D] of a run's keys as whole numbers, and keys in double."""
    data = rows.numpy()
    if quantizer.kind == "int8":
        numbers = data.astype(np.int64)
    else:
        numbers = np.zeros((len(data), quantizer.dim), dtype=np.int64)
        for i in range(quantizer.dim // 2):
            numbers[:, 2 * i] = data[:, i] % 16
            numbers[:, 2 * i + 1] = data[:, i] // 16
    scale, zero = quantizer.key_scale[run].double().numpy(), quantizer.key_zero[run].double().numpy()
    return numbers, numbers * scale + zero


# ---- the format


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_rows_are_as_described(kind: str, dim: int) -> None:
    keys, values = torch.randn(2, 3, 9, dim), torch.randn(2, 3, 9, dim)
    quantizer = of(kind, keys, values)
    half = 1 if kind == "int8" else 2
    assert (quantizer.key_bytes, quantizer.value_bytes) == (dim // half, dim // half + 4)
    rows = quantizer.quantize_keys(flat(keys))
    assert rows.dtype == torch.uint8
    assert rows.shape == (6, 9, quantizer.key_bytes)
    for run in range(6):
        numbers, decoded = plain_decode(quantizer, rows[run], run)
        assert numbers.max() <= quantizer.levels
        torch.testing.assert_close(quantizer.dequantize_keys(rows[run], run), torch.tensor(decoded).float())
    rows = quantizer.quantize_values(values)
    assert rows.shape == (2, 3, 9, quantizer.value_bytes)
    row = rows[1, 2, 4].numpy().tobytes()
    scale, zero = np.frombuffer(row[-4:], dtype="<f2").astype(np.float64)
    first = row[0] if kind == "int8" else row[0] & 15
    second = row[1] if kind == "int8" else row[0] >> 4
    decoded = quantizer.dequantize_values(rows)[1, 2, 4]
    assert decoded[0].item() == pytest.approx(first * scale + zero, rel=1e-6, abs=1e-7)
    assert decoded[1].item() == pytest.approx(second * scale + zero, rel=1e-6, abs=1e-7)
    scales, zeros = quantizer.value_scales(rows)
    assert (scales[1, 2, 4].item(), zeros[1, 2, 4].item()) == (scale, zero)


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_are_those_of_the_formula(kind: str) -> None:
    keys = torch.randn(2, 3, 50, 8)
    quantizer = of(kind, keys, keys)
    low, high = flat(keys).amin(1), flat(keys).amax(1)
    margin = (high - low) / 8 if kind == "int8" else torch.zeros_like(low)
    torch.testing.assert_close(quantizer.key_zero, low - margin)
    torch.testing.assert_close(quantizer.key_scale * quantizer.levels, high - low + 2 * margin)
    assert quantizer.key_scale.dtype == quantizer.key_zero.dtype == torch.float32
    assert quantizer.nbytes == 2 * 6 * 8 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_only_real_columns_count(kind: str) -> None:
    keys = torch.randn(2, 3, 20, 6)
    padded = torch.cat([torch.full((2, 3, 4, 6), 1e6), keys], 2)
    real = torch.arange(24).repeat(2, 1) >= torch.tensor([[4], [9]])
    quantizer = of(kind, padded, keys, real)
    alone = [of(kind, keys[:1], keys[:1]), of(kind, keys[1:, :, 5:], keys[1:])]
    assert torch.equal(quantizer.key_scale, torch.cat([part.key_scale for part in alone]))
    assert torch.equal(quantizer.key_zero, torch.cat([part.key_zero for part in alone]))
    nothing = of(kind, padded, keys, torch.zeros_like(real))
    assert not nothing.key_scale.any()
    assert not nothing.key_zero.any()
    assert torch.equal(every_run(nothing, nothing.quantize_keys(flat(keys))), torch.zeros(6, 20, 6))
    empty = of(kind, keys[:, :, :0], keys)
    assert torch.equal(empty.key_scale, nothing.key_scale)


# ---- errors of half a step


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, Tensor, Tensor]:
    """keys [1, H, n, D] and values [1, H, n, Dv] of any dtype, with outliers, offsets and many magnitudes."""
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(DTYPES))
    heads, n = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    dim, value_dim = (draw(st.integers(1, 9)) for _ in range(2))
    if kind == "int4":
        dim, value_dim = 2 * dim, 2 * value_dim
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale, offset = 10.0 ** draw(st.integers(-6, 3)), draw(st.sampled_from([0.0, 1.0, -30.0, 4000.0]))
    made = []
    for width in (dim, value_dim):
        numbers = torch.randn(1, heads, n, width, generator=generator) * scale + offset
        numbers[..., 0] *= draw(st.sampled_from([0.0, 1.0, 50.0]))
        made.append(numbers.clamp(-6e4, 6e4).to(dtype))
    return kind, *made


@settings(max_examples=150, deadline=None)
@given(tensors())
def test_no_number_is_further_than_half_a_step(case: tuple[str, Tensor, Tensor]) -> None:
    kind, keys, values = case
    quantizer = of(kind, keys, values)
    decoded = every_run(quantizer, quantizer.quantize_keys(flat(keys)))
    bound = quantizer.key_scale[:, None] / 2 + flat(keys).float().abs().amax() * EPS
    assert bool(((decoded - flat(keys).float()).abs() <= bound).all())
    rows = quantizer.quantize_values(values)
    scale, zero = quantizer.value_scales(rows)
    numbers = values.float()
    bound = scale[..., None] / 2 + numbers.abs().amax(-1, keepdim=True) * EPS
    assert bool(((quantizer.dequantize_values(rows) - numbers).abs() <= bound).all())
    # The range of a token is hardly wider than its numbers: float16 rounds by at most 2^-10, or 2^-24 near zero.
    low, high = numbers.aminmax(dim=-1)
    assert bool(((zero <= low) | (zero - low <= 2**-25)).all())
    assert bool((zero >= low - low.abs() * 2**-10 - 2**-24).all())
    assert bool((zero + scale * quantizer.levels >= high - high.abs() * EPS).all())
    widest = (high - low) + low.abs() * 2**-10 + 2**-24
    assert bool((scale * quantizer.levels <= widest * (1 + 2**-9) + quantizer.levels * 2**-23).all())


@settings(max_examples=100, deadline=None)
@given(tensors())
def test_dequantized_keys_have_the_same_levels(case: tuple[str, Tensor, Tensor]) -> None:
    """Codes of decoded numbers: the same again, so that one loss is all there is."""
    kind, keys, values = case
    quantizer = of(kind, keys, values)
    rows = quantizer.quantize_keys(flat(keys))
    decoded = every_run(quantizer, rows)
    fine = (quantizer.key_scale > quantizer.key_zero.abs() * 2**-18)[:, None]  # float32 distinguishes its levels
    again = every_run(quantizer, quantizer.quantize_keys(decoded))
    assert torch.equal(again.where(fine, 0), decoded.where(fine, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_keys_beyond_the_range_become_its_ends(kind: str) -> None:
    keys = torch.randn(1, 1, 30, 4)
    quantizer = of(kind, keys, keys)
    low, high = quantizer.key_zero[0], quantizer.key_zero[0] + quantizer.key_scale[0] * quantizer.levels
    later = torch.stack([keys[0, 0].amin(0) - 100, keys[0, 0].amax(0) + 100])[None]
    decoded = every_run(quantizer, quantizer.quantize_keys(later))[0]
    torch.testing.assert_close(decoded, torch.stack([low, high]))
    if kind == "int8":  # an eighth more on each side for tokens to come
        edge = keys[0, 0].amax(0) + (keys[0, 0].amax(0) - keys[0, 0].amin(0)) * 0.12
        got = every_run(quantizer, quantizer.quantize_keys(edge[None, None]))[0, 0]
        assert bool(((got - edge).abs() <= quantizer.key_scale[0] * 0.501).all())


# ---- constants


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [0.0, 0.1, -3.7, 12345.0, 1e-9])
def test_constant_channels_and_tokens_are_exact(kind: str, dtype: torch.dtype, constant: float) -> None:
    keys = torch.randn(1, 2, 7, 4, dtype=dtype)
    keys[..., 1] = constant
    quantizer = of(kind, keys, keys)
    decoded = every_run(quantizer, quantizer.quantize_keys(flat(keys)))
    assert torch.equal(decoded[..., 1], keys[0, ..., 1].float())
    token = torch.full((4,), constant, dtype=dtype)
    got = quantizer.dequantize_values(quantizer.quantize_values(token))
    if torch.equal(token.half().to(dtype), token):
        assert torch.equal(got, token.float())
    else:  # the float16 below it, and a last step of 1/510 or 1/30 of the rest
        assert bool(((got - token.float()).abs() <= token.float().abs() * 2**-10 / quantizer.levels + 2**-24).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_of_any_constant_float16(kind: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[torch.isfinite(every)].to(dtype)
    every = every[every.half().to(dtype) == every]
    quantizer = of(kind, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    got = quantizer.dequantize_values(quantizer.quantize_values(every[:, None].expand(-1, 2)))
    assert torch.equal(got, every.float()[:, None].expand(-1, 2))


# ---- what is not finite, or too large


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_with_its_token(kind: str, dtype: torch.dtype, odd: float) -> None:
    clean_keys, clean_values = (torch.randn(1, 2, 10, 6, dtype=dtype) for _ in range(2))
    keys, values = clean_keys.clone(), clean_values.clone()
    keys[0, 1, 3, 2], values[0, 1, 3, 2] = odd, odd
    quantizer = of(kind, keys, values)
    others = torch.ones(2, 10, dtype=torch.bool)
    others[1, 3] = False
    decoded = every_run(quantizer, quantizer.quantize_keys(flat(keys)))
    assert torch.isfinite(decoded).all()
    low, high = quantizer.key_zero[1, 2], quantizer.key_zero[1, 2] + quantizer.key_scale[1, 2] * quantizer.levels
    torch.testing.assert_close(decoded[1, 3, 2], high if odd == torch.inf else low)
    bound = quantizer.key_scale[:, None] * 0.501
    assert bool(((decoded - flat(clean_keys).float()).abs() <= bound)[others].all())
    rows = quantizer.quantize_values(values)
    decoded = quantizer.dequantize_values(rows)[0]
    assert torch.isnan(decoded[1, 3]).all()
    assert torch.equal(decoded[others], quantizer.dequantize_values(quantizer.quantize_values(clean_values))[0][others])


@pytest.mark.parametrize("kind", KINDS)
def test_very_large_numbers(kind: str) -> None:
    """Up to 65504 downwards and some multiple of it upwards there is a scale; beyond, a token is NaN and says so."""
    values = torch.tensor([[-65504.0, 0, 65504, 5], [6e4, 8e4, 9e4, 1e5], [-1e5, 0, 0, 0], [7e4] * 4, [0, 0, 0, 1e38]])
    quantizer = of(kind, torch.zeros(1, 1, 1, 4), values)
    rows = quantizer.quantize_values(values)
    decoded, scale = quantizer.dequantize_values(rows), quantizer.value_scales(rows)[0][:, None]
    assert bool(((decoded - values).abs() <= scale / 2 * 1.001)[:2].all())
    assert torch.isnan(decoded[2:]).all()
    keys = torch.tensor([3e38, -3e38, 0.0, 1.0]).view(1, 1, 4, 1).expand(-1, -1, -1, 4)
    quantizer = of(kind, keys, values)
    assert torch.isfinite(every_run(quantizer, quantizer.quantize_keys(flat(keys)))).all()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=20))
def test_rounding_down_to_float16(numbers: list[float]) -> None:
    given_ = torch.tensor(numbers, dtype=torch.float32)
    got = module._down(given_)
    normal = got.abs() >= 2**-14
    assert torch.equal(got.half().float()[normal], got[normal])
    assert bool((got <= given_).all())
    assert bool(((got.half().float() - given_).abs() <= given_.abs() * 2**-10 + 2**-24).all())


# ---- pieces, runs, mistakes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_and_single_rows_give_the_same_bytes(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = torch.randn(2, 3, 31, 8, dtype=dtype), torch.randn(2, 3, 31, 10, dtype=dtype)
    real = torch.rand(2, 31) < 0.7
    quantizer = of(kind, keys, values, real)
    rows, value_rows = quantizer.quantize_keys(flat(keys)), quantizer.quantize_values(values)
    run = torch.randint(0, 6, (40,))
    place = torch.randint(0, 31, (40,))
    monkeypatch.setattr(module, "_at_once", lambda numbers: 50)
    pieces = of(kind, keys, values, real)
    assert torch.equal(pieces.key_scale, quantizer.key_scale)
    assert torch.equal(pieces.quantize_keys(flat(keys)), rows)
    assert torch.equal(pieces.quantize_values(values), value_rows)
    picked = quantizer.quantize_key_rows(flat(keys)[run, place], run)
    assert torch.equal(picked, rows[run, place])
    assert torch.equal(quantizer.dequantize_keys(picked, run), every_run(quantizer, rows)[run, place])
    assert quantizer.quantize_key_rows(flat(keys)[run[:0], place[:0]], run[:0]).shape == (0, quantizer.key_bytes)
    assert quantizer.quantize_values(values[:, :, :0]).shape == (2, 3, 0, quantizer.value_bytes)


def test_other_runs_read_their_own_ranges() -> None:
    keys = torch.randn(1, 3, 20, 4) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    quantizer = of("int8", keys, keys)
    rows = quantizer.quantize_keys(flat(keys))
    index = torch.tensor([2, 0, 2])
    other = quantizer.select(index)
    assert torch.equal(every_run(other, rows[index]), every_run(quantizer, rows)[index])
    assert other.nbytes == quantizer.nbytes


def test_wrong_use_is_explained() -> None:
    odd = torch.zeros(1, 1, 2, 5)
    with pytest.raises(MethodError, match=r"int4.*even.*got 5.*int8"):
        of("int4", odd, odd[..., :4])
    with pytest.raises(MethodError, match=r"even.*got 4 for keys and 5 for values"):
        of("int4", odd[..., :4], odd)
    with pytest.raises(MethodError, match="kv_dtype"):
        of("int3", odd, odd)
    assert of("int8", odd, odd).key_bytes == 5


class Sizes(TorchDispatchMode):
    """Bytes of every storage that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(item, Tensor):
                self.found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        return result


def test_temporaries_do_not_grow_with_the_prompt() -> None:
    keys = torch.ones(1, 2, 2**16, 64, dtype=torch.bfloat16)  # 16 MiB
    keys[0, 1, 5, 3] = torch.nan
    with Sizes() as sizes:
        quantizer = of("int8", keys, keys)
        rows = quantizer.quantize_keys(flat(keys)), quantizer.quantize_values(keys)
        run = torch.zeros(2**16, dtype=torch.int64)
        rows += (quantizer.quantize_key_rows(keys[0, 0], run),)
    for known in (keys, *rows):
        sizes.found.pop(known.untyped_storage().data_ptr())
    assert max(sizes.found.values()) <= 4 * 2**20  # as float32
