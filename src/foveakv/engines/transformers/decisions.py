"""Carry out what methods decide: store a prompt, evict, offload chunks.

Decisions are checked before anything changes.
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
    """How a cache stores slots. method: its method's name, for messages."""

    method: str
    backend: str
    kv_dtype: str | None
    residual_length: int


def store_prompt(view: PrefillView, decision: Decision, storage: Storage) -> tuple[Segments, ChunkStore | None]:
    """The slots and the chunks of one layer that stay after its prefill.

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
        raise MethodError(f"{storage.method}: single slots are evicted by `decode`; `prefill` returns a mask to keep")
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
    """Carries out a decision that was taken after the last layer; returns the layer's store.

    real: bool [B, C], the prompt's columns, over which the decision's masks are.
    """
    batch, columns = real.shape
    check_keep(storage.method, decision.keep, (batch, segments.heads, columns))
    if decision.keys is not None or decision.values is not None or decision.fields:
        raise MethodError(f"{storage.method}: keys, values and fields are replaced by `prefill` only")
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
    """Carries out the evictions of a decode step."""
    if decision.evict is not None:
        segments.evict(decision.evict.slots, decision.evict.counts)
    if decision.keep is not None:
        check_keep(method, decision.keep, (segments.batch, segments.heads, segments.max_length))
        segments.keep(decision.keep)


def reserve(segments: Segments, store: ChunkStore, chunks: Tensor, backend: str) -> None:
    """From here on every step reads chunks [B, H] of the store, in place where the backend can."""
    store.reserve(segments, chunks, in_place=reads_pages(segments.runs, store.stored, backend))


def check_keep(method: str, keep: Tensor | None, shape: tuple[int, int, int]) -> None:
    """Raises `MethodError` unless keep is None, bool [B, H, n] or bool [B, 1, n]."""
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
    """Raises `UnsupportedModeError` where the prompt's activations are NaN or infinite: scores would mean nothing.

    Only the newest query row is looked at; what overflows spreads to it through the layers.
    """
    if view.query.shape[-2] and not bool(view.query[..., -1, :].isfinite().all()):
        raise UnsupportedModeError(
            f"the activations of this prompt contain NaN or infinity in layer {view.layer_idx}: {view.query.dtype} "
            "overflows in this model; load it in bfloat16 or float32"
        )
