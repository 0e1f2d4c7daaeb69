"""The masked reference with keys and values rounded to quantized levels, for runs with a `kv_dtype`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import masked_reference
import matrix
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from foveakv.memory.quantizer import Quantizer

KINDS = ["int8", "int4"]


TOLERANCE = 1e-5  # decoded numbers are float32, whatever the model computes in


class _Coded:
    """What the reference needs to know: the quantizer, the residual window, and the real columns of the prompt."""

    def __init__(self, kind: str, window: int, real: Tensor) -> None:
        self.kind, self.window, self.real = kind, window, real

    def stored(self, key: Tensor, value: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, columns, ...] as a memory gives them back that keeps the positions kept [B, H, M]
        of the prompt, and appended every later column."""
        batch, heads, columns, _ = key.shape
        real = self.real.repeat_interleave(batch // len(self.real), 0)
        prompt = real.shape[1]
        quantizer = Quantizer.of_prompt(self.kind, key[:, :, :prompt], value.shape[-1], real)
        rows = quantizer.quantize_keys(key.flatten(0, 1))
        keys = quantizer.dequantize_keys(rows, torch.arange(batch * heads)[:, None]).view(key.shape).to(key.dtype)
        values = quantizer.dequantize_values(quantizer.quantize_values(value)).to(value.dtype)
        if self.window:
            newest = torch.zeros(batch, heads, columns, dtype=torch.bool)
            newest[..., max(prompt, columns - self.window) :] = True
            left = self.window - (columns - prompt)  # exact copies of the prompt's tokens that are not yet replaced
            order = torch.where((kept >= 0) & (kept < prompt), kept, -1).sort(-1, descending=True).values
            order = order[..., : max(0, left)]
            newest[..., :prompt] |= torch.nn.functional.one_hot(order + 1, prompt + 1).sum(-2)[..., 1:].bool()
            keys, values = keys.where(~newest[..., None], key), values.where(~newest[..., None], value)
        return keys, values


_coding: list[_Coded] = []


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """The masked reference, over what quantization leaves of keys and values in the layers that are compressed."""
    replay = masked_reference._running[-1]
    if replay.step > 0 and module.layer_idx in (replay.trace[replay.step] or {}):
        first = next(step for step in replay.trace if step and module.layer_idx in step)
        key, value = _coding[-1].stored(key, value, first[module.layer_idx])
    return masked_reference._attention(module, query, key, value, mask, **kwargs)


AttentionInterface.register("coded_reference", _attention)
AttentionMaskInterface.register("coded_reference", sdpa_mask)


@contextmanager
def coded(kind: str, window: int, inputs: dict[str, Any]) -> Iterator[None]:
    """Inside, `masked` replays with quantized keys and values."""
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    _coding.append(_Coded(kind, window, real))
    before, masked_reference.NAME = masked_reference.NAME, "coded_reference"
    try:
        yield
    finally:
        masked_reference.NAME = before
        _coding.pop()


def compressed(model: Any, method: Any, inputs: dict[str, Any], kind: str, window: int, **options: Any) -> matrix.Run:
    """Generates with a kv_dtype and a trace; `backend` among the options goes to `compress`."""
    session = {"kv_dtype": kind, "residual_length": window, "backend": options.pop("backend", "auto")}
    return matrix.compressed(model, method, inputs, session_options=session, **options)


def check(model: Any, run: matrix.Run, inputs: dict[str, Any], kind: str, window: int, **options: Any) -> None:
    with coded(kind, window, inputs):
        matrix.check_against_reference(model, run, inputs, TOLERANCE, **options)
