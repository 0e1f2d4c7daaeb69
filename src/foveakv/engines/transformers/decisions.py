"""Carry out the decisions of methods: store a prompt, evict slots, offload chunks.

Decisions are validated before anything is changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foveakv.engines.transformers.decision_checks import (
    check_complete,
    check_evict,
    check_keep,
    check_prefill,
    check_reserve,
    check_settled,
)
from foveakv.errors import MethodError, UnsupportedModeError
from foveakv.kernels.paged import reads_pages
from foveakv.memory.chunk_growth import extend
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
    check_prefill(storage.method, decision, view)
    keys = view.keys if decision.keys is None else decision.keys
    values = view.values if decision.values is None else decision.values
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
        reserve(segments, store, decision.chunks, storage)
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
        MethodError: the decision does not fit the prompt.
        StoreError: chunks cannot be written to disk.
    """
    batch, columns = real.shape
    check_settled(storage.method, decision, segments, store, (batch, segments.heads, columns))
    if decision.offload is not None:
        keys, values = segments.gather()
        store = _offloaded(decision.offload, keys, values, segments.valid()[:, 0], segments.positions()[:, 0])
    if decision.keep is not None:
        keep_columns(segments, decision.keep)
    if store is not None and decision.chunks is not None:
        reserve(segments, store, decision.chunks, storage)
    check_complete(storage.method, decision, store)
    return store


def keep_columns(segments: Segments, keep: Tensor) -> None:
    """Keep prompt columns of a layer that stores its prompt; keep: bool [B, H or 1, C]."""
    positions = segments.positions()  # right after the prompt, a slot's position is its column
    keep = keep.to(positions.device).expand(-1, segments.heads, -1)
    segments.keep(keep.gather(2, positions.clamp_min(0)) & (positions >= 0))


def evict(segments: Segments, decision: Decision, method: str) -> None:
    """Carry out the evictions of a decode step.

    Raises:
        MethodError: the mask or the single slots do not fit the stored ones, or both are given.
    """
    if decision.evict is not None and decision.keep is not None:
        raise MethodError(f"{method}: `decode` returned both `keep` and `evict`; return one of them")
    if decision.evict is not None:
        check_evict(method, decision.evict, segments)
        try:
            segments.evict(decision.evict.slots, decision.evict.counts)
        except ValueError as error:  # slots that are not stored, where their numbers are on the host
            raise MethodError(f"{method}: {error}") from error
    if decision.keep is not None:
        check_keep(method, decision.keep, (segments.batch, segments.heads, segments.max_length))
        segments.keep(decision.keep)


def reserve(segments: Segments, store: ChunkStore, chunks: Tensor, storage: Storage) -> None:
    """Let every step read `chunks` [B, H] chunks of the store, in place if the backend supports it.

    Raises:
        MethodError: chunks were decided before, or tokens would be attended to twice.
    """
    check_reserve(storage.method, segments, store, chunks)
    store.reserve(segments, chunks, in_place=reads_pages(segments.runs, store.stored, storage.backend))


def _offloaded(offload: Offload, keys: Tensor, values: Tensor, real: Tensor, positions: Tensor) -> ChunkStore:
    return ChunkStore(
        keys, values, real, positions, offload.heads.to(keys.device), chunk=offload.chunk, place=offload.place,
        directory=offload.directory, digest_dtype=offload.digest_dtype, summary=offload.summary,
    )  # fmt: skip


def offload_further(
    store: ChunkStore | None, offload: Offload, keys: Tensor, values: Tensor, stored: Tensor, positions: Tensor,
    method: str,
) -> tuple[ChunkStore, int]:  # fmt: skip
    """Move the complete chunks of what some heads store to a store, which may have chunks of earlier blocks.

    Args:
        store: withdrawn, see `memory.chunk_growth`; None: there is none yet.
        offload: the decision.
        keys, values: [B, H, C, D] and [B, H, C, Dv].
        stored: bool [B, H, C].
        positions: int64 [B, C] or [B, H, C].
        method: name of the method, for messages.

    Returns:
        The store, and the number of slots that were moved.

    Raises:
        MethodError: the store has chunks of another kind.
        StoreError: chunks cannot be written to disk.
    """
    heads = offload.heads.to(keys.device)
    if store is None:
        store = ChunkStore(
            keys[:, :, :0], values[:, :, :0], stored[:, 0, :0], positions[..., 0, :0].view(len(keys), 0),
            torch.zeros_like(heads), chunk=offload.chunk, place=offload.place, directory=offload.directory,
            digest_dtype=offload.digest_dtype, summary=offload.summary,
        )  # fmt: skip
    for what, former, given in (
        ("chunk", store.chunk, offload.chunk),
        ("place", store.place, offload.place),
        ("summary", store.summary, offload.summary),
        ("digest_dtype", store._digests.kind, offload.digest_dtype),
    ):
        if former != given:
            raise MethodError(
                f"{method}: the chunks of earlier blocks have {what} {former!r}, so those of a further block cannot "
                f"have {given!r}; keep what the first block was given"
            )
    return store, extend(store, keys, values, stored, positions, heads, offload.directory)


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
