"""8-bit and 4-bit quantization of keys and values.

    key[c]   = level[c] * key_scale[r, c] + key_zero[r, c]      one scale and zero per run and channel
    value[c] = level[c] * scale + zero                          one scale and zero per token, at the end of its row

Keys have a few channels of large magnitude, the same for all tokens, so each channel has its own range; values have
none, so a token's range serves all channels (KIVI, arXiv 2402.02750, Sec. 3). A row is D bytes, or D/2 with
channel 2i in the low and 2i + 1 in the high half of byte i; a row of values ends in 4 more bytes, the float16 scale and
the float16 zero, little endian. Slots are quantized once: moving a slot copies its bytes.

Notation: R runs, run r = b * H + h; K and V are the bytes of a row of keys and of values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.memory.residual import LARGEST

LEVELS = {"int8": 255, "int4": 15}  # the highest level
MARGIN = {"int8": 0.125, "int4": 0.0}  # a key channel's range is widened by this share on both sides, for later tokens
_TAIL = 4  # bytes of scale and zero at the end of a row of values


def check_options(kv_dtype: Any, residual_length: Any = 0) -> None:
    """Raise MethodError unless kv_dtype is "int8", "int4" or None and residual_length a number of tokens."""
    if kv_dtype is not None and (not isinstance(kv_dtype, str) or kv_dtype not in LEVELS):
        close = difflib.get_close_matches(str(kv_dtype), LEVELS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise MethodError(f"unknown kv_dtype {kv_dtype!r}{hint}; choose 'int8', 'int4', or None for the model's own")
    if (
        isinstance(residual_length, bool)
        or not isinstance(residual_length, Integral)
        or not 0 <= int(residual_length) <= LARGEST
    ):
        raise MethodError(
            f"residual_length must be a whole number from 0 to {LARGEST} (the newest tokens that are also kept in full "
            f"precision); got {residual_length!r}"
        )


def check_dims(kv_dtype: str | None, dim: int, value_dim: int) -> None:
    """Raise MethodError where keys of `dim` and values of `value_dim` channels cannot be packed."""
    if kv_dtype == "int4" and (dim % 2 or value_dim % 2):
        raise MethodError(
            f"kv_dtype='int4' packs two channels in a byte and needs even head dimensions, got {dim} for keys and "
            f"{value_dim} for values; choose kv_dtype='int8'"
        )


@dataclass(frozen=True)
class Quantizer:
    """How the rows of one layer are quantized. Immutable: `select` makes one for other runs.

    kind: "int8" or "int4". dim, value_dim: D and Dv. key_scale, key_zero: float32 [R, D].
    """

    kind: str
    dim: int
    value_dim: int
    key_scale: Tensor
    key_zero: Tensor

    @classmethod
    def of_prompt(cls, kind: str, keys: Tensor, value_dim: int, real: Tensor | None = None) -> Quantizer:
        """Make a quantizer from the ranges of a prompt's key channels: keys [B, H, C, D], real bool [B, C] or None.

        A channel ranges from its lowest to its highest finite number in the real columns (None: all), widened by
        `MARGIN`. One without any finite number becomes 0. MethodError: an odd head dimension with "int4".
        """
        dim = keys.shape[-1]
        check_options(kind)
        check_dims(kind, dim, value_dim)
        low, high = _ranges(keys.detach(), real)
        margin = (high - low) * MARGIN[kind]
        with torch.inference_mode(False):
            return cls(kind, dim, value_dim, (high - low + 2 * margin) / LEVELS[kind], low - margin)

    @property
    def levels(self) -> int:
        """The highest level: 255 or 15."""
        return LEVELS[self.kind]

    @property
    def key_bytes(self) -> int:
        """K, bytes of a row of keys."""
        return self.dim if self.kind == "int8" else self.dim // 2

    @property
    def value_bytes(self) -> int:
        """V, bytes of a row of values."""
        return (self.value_dim if self.kind == "int8" else self.value_dim // 2) + _TAIL

    @property
    def nbytes(self) -> int:
        """Storage bytes of scales and zeros of the keys; those of the values are in their rows."""
        return self.key_scale.untyped_storage().nbytes() + self.key_zero.untyped_storage().nbytes()

    def select(self, runs: Tensor) -> Quantizer:
        """Make the quantizer of a memory whose run i is the former run runs[i]; int64 [R']."""
        runs = runs.to(self.key_scale.device)
        with torch.inference_mode(False):
            return replace(self, key_scale=self.key_scale[runs], key_zero=self.key_zero[runs])

    # ---- numbers -> rows

    def quantize_keys(self, keys: Tensor) -> Tensor:
        """keys [R, n, D] or [B, H, n, D], any float dtype -> uint8 [..., n, K].

        Each number becomes the nearest level of its channel's range, at most half a step (key_scale / 2) away inside
        the range. Numbers outside, infinities included, become the end of the range, and NaN its lower end.
        """
        if keys.numel() <= _at_once(keys):
            ranges = (*keys.shape[:-2], 1, self.dim)
            return self._key_rows(keys, self.key_scale.view(ranges), self.key_zero.view(ranges))
        rows = keys.flatten(0, -3)
        packed = torch.empty(*rows.shape[:2], self.key_bytes, dtype=torch.uint8, device=keys.device)
        for run, numbers in enumerate(rows.unbind()):
            for part in _parts(numbers):
                packed[run, part] = self._key_rows(numbers[part], self.key_scale[run], self.key_zero[run])
        return packed.view(*keys.shape[:-1], -1)

    def quantize_key_rows(self, keys: Tensor, run: Tensor) -> Tensor:
        """As `quantize_keys`, for single rows keys [n, D] of the runs run [n] int64 -> uint8 [n, K]."""
        packed = torch.empty(keys.shape[0], self.key_bytes, dtype=torch.uint8, device=keys.device)
        for part in _parts(keys):
            packed[part] = self._key_rows(keys[part], self.key_scale[run[part]], self.key_zero[run[part]])
        return packed

    def quantize_values(self, values: Tensor) -> Tensor:
        """values [..., Dv], any float dtype -> uint8 [..., V].

        The zero is the token's lowest number rounded down, and the scale reaches its highest rounded up, so that every
        number is at most scale / 2 from its level. A token whose numbers are all the same float16 is stored exactly.
        Where a NaN, an infinity or a lowest number beyond float16 (65504) leaves no usable zero and scale, all channels
        of the token become NaN.
        """
        if values.numel() <= _at_once(values):
            return self._value_rows(values)
        rows = values.reshape(-1, values.shape[-1])
        packed = torch.empty(rows.shape[0], self.value_bytes, dtype=torch.uint8, device=rows.device)
        for part in _parts(rows):
            packed[part] = self._value_rows(rows[part])
        return packed.view(*values.shape[:-1], -1)

    def store(self, buffer: Tensor, source: Tensor, target: Tensor, index: Tensor, run: Tensor | None) -> None:
        """buffer[target] = quantized source[index], in pieces; run: the runs of keys, int64 [n], None for values."""
        for part in _parts(index, source.shape[-1]):
            rows = source.index_select(0, index[part])
            packed = self.quantize_values(rows) if run is None else self.quantize_key_rows(rows, run[part])
            buffer.index_copy_(0, target[part], packed)

    # ---- rows -> numbers

    def dequantize_keys(self, rows: Tensor, run: int | Tensor) -> Tensor:
        """rows uint8 [..., K] -> float32 [..., D]; run: one number, or int64 that broadcasts to the leading shape."""
        return self._levels(rows).to(torch.float32).mul_(self.key_scale[run]).add_(self.key_zero[run])

    def dequantize_values(self, rows: Tensor) -> Tensor:
        """rows uint8 [..., V] -> float32 [..., Dv]."""
        scale, zero = self.value_scales(rows)
        return self._levels(rows[..., :-_TAIL]).to(torch.float32).mul_(scale[..., None]).add_(zero[..., None])

    def value_scales(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero, float32 [...] each, of rows of values uint8 [..., V]."""
        tail = rows[..., -_TAIL:].clone(memory_format=torch.contiguous_format).view(torch.float16).to(torch.float32)
        return tail[..., 0], tail[..., 1]

    # ---- inside

    def _key_rows(self, keys: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        # A channel of scale 0 divides by it: 0/0 is NaN, the rest infinite, and every level stands for its zero.
        return self._pack((keys - zero).div_(scale))

    def _value_rows(self, values: Tensor) -> Tensor:
        numbers = values.detach().to(torch.float32)
        zero = _down(numbers.amin(-1, keepdim=True)).to(torch.float16)
        # A little more than the range, so that rounding to float16 never gives less.
        scale = (numbers.amax(-1, keepdim=True) - zero).mul_((1 + 2**-10) / self.levels).add_(2**-24).to(torch.float16)
        packed = self._pack((numbers - zero).div_(scale))
        # As bytes: under autocast `cat` refuses dtypes that are not the one it casts to.
        return torch.cat((packed, scale.view(torch.uint8), zero.view(torch.uint8)), -1)

    def _pack(self, steps: Tensor) -> Tensor:
        """Distances from the zero in steps [..., D] (overwritten) -> packed levels."""
        packed = steps.nan_to_num_(nan=0.0).round_().clamp_(0, self.levels).to(torch.uint8)
        return packed if self.kind == "int8" else packed[..., 0::2] | packed[..., 1::2] << 4

    def _levels(self, rows: Tensor) -> Tensor:
        """Packed levels -> uint8 [..., D], one level each."""
        return rows if self.kind == "int8" else torch.stack((rows & 15, rows >> 4), -1).flatten(-2)


def _at_once(numbers: Tensor) -> int:
    """How many numbers are quantized at once: temporaries take about ten bytes for each."""
    return 2**20 if numbers.device.type == "cpu" else 2**24


def _parts(rows: Tensor, width: int | None = None) -> Iterator[slice]:
    """Slices of rows [n, ...] that are quantized at once; width: numbers in a row."""
    width = rows[:1].numel() if width is None else width
    step = max(1, _at_once(rows) // max(1, width))
    for low in range(0, len(rows), step):
        yield slice(low, low + step)


def _down(numbers: Tensor) -> Tensor:
    """Float32 numbers, rounded down to as many bits as float16 has; the fewer bits below 2^-14 are left to float16."""
    bits = numbers.view(torch.int32)
    return ((bits >> 31) & 0x1FFF).add_(bits).bitwise_and_(-0x2000).view(torch.float32)


def _ranges(keys: Tensor, real: Tensor | None) -> tuple[Tensor, ...]:
    """Lowest and highest finite number of every run and channel in the real columns: float32 [R, D]; 0 for none.

    Numbers near the ends of float32 count as less, so that no range is infinite.
    """
    batch, heads, columns, dim = keys.shape
    most = torch.finfo(torch.float32).max / 8
    if columns and (real is None or bool(real.all())):
        low, high = keys.amin(2), keys.amax(2)  # several times faster than aminmax
        if bool(torch.isfinite(low).all()) and bool(torch.isfinite(high).all()):
            return tuple(bound.to(torch.float32).clamp(-most, most).view(-1, dim) for bound in (low, high))
    low = keys.new_full((batch, heads, dim), torch.inf, dtype=torch.float32)
    high = torch.full_like(low, -torch.inf)
    for part in _parts(keys.movedim(2, 0)):
        numbers = keys[:, :, part].to(torch.float32)
        counted = torch.isfinite(numbers)
        if real is not None:
            counted &= real[:, None, part, None].to(keys.device)
        low = torch.minimum(low, numbers.where(counted, torch.inf).amin(2))
        high = torch.maximum(high, numbers.where(counted, -torch.inf).amax(2))
    none = low > high
    return tuple(bound.masked_fill_(none, 0).clamp_(-most, most).view(-1, dim) for bound in (low, high))
