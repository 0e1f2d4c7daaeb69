"""Carry out the decisions of methods: store a prompt, evict slots, offload chunks.

Decisions are validated before anything is changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foveakv.errors import MethodError, UnsupportedModeError
from foveakv.kernels.paged import reads_pages
from foveakv.memory.chunks import ChunkStore
from foveakv.memory.segments import Segments
from foveakv.methods.views import Decision, Offload, PrefillView


@dataclass(frozen=True)
class Storage:
    """How a cache stores slots.

    method: name of the method, for messages. backend: attention backend. kv_dtype: dtype of quantized slots, or None.
    residual_length: newest tokens in full precision, with a kv_dtype.
    """

    method: str
    backend: str
    kv_dtype: str | None
    residual_length: int


def store_prompt(view: PrefillView, decision: Decision, storage: Storage) -> tuple[Segments, ChunkStore | None]:
    """Store one layer's prompt after its prefill.

    Returns:
        The stored slots, and the store of offloaded chunks, if any.

    Raises:
        MethodError: the decision does not fit the view.
        StoreError: chunks cannot be written to disk.
    """
    batch, heads, columns = view.keys.shape[:3]
    real = view.prompt.real[:, None]
    check_keep(storage.method, decision.keep, (batch, heads, columns))
    keys = _replaced(storage.method, "keys", decision.keys, view.keys)
    values = _replaced(storage.method, "values", decision.values, view.values)
    if decision.evict is not None:
        raise MethodError(f"{storage.method}: `prefill` cannot evict individual slots; return a mask `keep` instead")
    keep = (real if decision.keep is None else decision.keep.to(real.device) & real).expand(batch, heads, columns)
    store = None
    if decision.offload is not None:
        store = _offloaded(decision.offload, keys, values, view.prompt.real, view.positions)
    segments = Segments.from_dense(
        keys, values, keep, view.positions,
        kv_dtype=storage.kv_dtype, residual_length=storage.residual_length, real=view.prompt.real,
    )  # fmt: skip
    if decision.fields:
        order = (~keep).to(torch.int8).argsort(dim=-1, stable=True)[..., : segments.max_length]
        for name, each in decision.fields.items():
            start = None if each.values is None else each.values.gather(-1, order)
            segments.add_field(name, start, dtype=each.dtype)
    if store is not None and decision.chunks is not None:
        reserve(segments, store, decision.chunks, storage.backend)
    return segments, store


def settle(
    segments: Segments, store: ChunkStore | None, decision: Decision, real: Tensor, storage: Storage
) -> ChunkStore | None:
    """Carry out one layer's decision from `after_prefill`.

    Args:
        segments: the stored slots.
        store: the store of offloaded chunks, if any.
        decision: its masks are over the prompt columns.
        real: bool [B, C], prompt columns that are not padding.
        storage: how the cache stores slots.

    Returns:
        The store of offloaded chunks, if any.

    Raises:
        MethodError: the decision does not fit the prompt, or replaces keys, values or fields.
        StoreError: chunks cannot be written to disk.
    """
    batch, columns = real.shape
    check_keep(storage.method, decision.keep, (batch, segments.heads, columns))
    if decision.keys is not None or decision.values is not None or decision.fields:
        raise MethodError(f"{storage.method}: only `prefill` can replace keys, values and fields")
    if decision.offload is not None and store is None:
        keys, values = segments.gather()
        store = _offloaded(decision.offload, keys, values, segments.valid()[:, 0], segments.positions()[:, 0])
    if decision.keep is not None:
        positions = segments.positions()  # right after the prompt, a slot's position is its column
        keep = decision.keep.to(positions.device).expand(-1, segments.heads, -1)
        segments.keep(keep.gather(2, positions.clamp_min(0)) & (positions >= 0))
    if store is not None and decision.chunks is not None:
        reserve(segments, store, decision.chunks, storage.backend)
    return store


def evict(segments: Segments, decision: Decision, method: str) -> None:
    """Carry out the evictions of a decode step.

    Raises:
        MethodError: the mask does not fit the stored slots.
    """
    if decision.evict is not None:
        segments.evict(decision.evict.slots, decision.evict.counts)
    if decision.keep is not None:
        check_keep(method, decision.keep, (segments.batch, segments.heads, segments.max_length))
        segments.keep(decision.keep)


def reserve(segments: Segments, store: ChunkStore, chunks: Tensor, backend: str) -> None:
    """Let every step read `chunks` [B, H] chunks of the store, in place if the backend supports it."""
    store.reserve(segments, chunks, in_place=reads_pages(segments.runs, store.stored, backend))


def check_keep(method: str, keep: Tensor | None, shape: tuple[int, int, int]) -> None:
    """Raise `MethodError` unless keep is None, bool [B, H, n] or bool [B, 1, n]; shape: (B, H, n)."""
    if keep is None:
        return
    batch, heads, width = shape
    if keep.dtype != torch.bool or keep.shape not in ((batch, heads, width), (batch, 1, width)):
        raise MethodError(
            f"{method}: keep must be bool [{batch}, {heads} or 1, {width}], got {keep.dtype} {list(keep.shape)}"
        )


def _replaced(method: str, what: str, new: Tensor | None, old: Tensor) -> Tensor:
    if new is None:
        return old
    if new.shape != old.shape or new.dtype != old.dtype:
        raise MethodError(
            f"{method}: replaced {what} must be {old.dtype} {list(old.shape)}, got {new.dtype} {list(new.shape)}"
        )
    return new


def _offloaded(offload: Offload, keys: Tensor, values: Tensor, real: Tensor, positions: Tensor) -> ChunkStore:
    return ChunkStore(
        keys, values, real, positions, offload.heads.to(keys.device), chunk=offload.chunk, place=offload.place,
        directory=offload.directory, digest_dtype=offload.digest_dtype, summary=offload.summary,
    )  # fmt: skip


def check_finite(view: PrefillView) -> None:
    """Check that the activations of the prompt are finite; scores would be meaningless otherwise.

    Only the newest query row is checked, since NaN and infinity propagate to it through the layers.

    Raises:
        UnsupportedModeError: the activations contain NaN or infinity.
    """
    if view.query.shape[-2] and not bool(view.query[..., -1, :].isfinite().all()):
        raise UnsupportedModeError(
            f"the activations of this prompt contain NaN or infinity in layer {view.layer_idx}: {view.query.dtype} "
            "overflows in this model; load it in bfloat16 or float32"
        )
