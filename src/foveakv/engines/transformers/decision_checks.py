"""Validate what methods return, before anything is changed. In decode steps no check waits for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.memory.chunks import ChunkStore
from foveakv.memory.quantized import RESIDUAL
from foveakv.memory.segments import Segments
from foveakv.methods.base import Method
from foveakv.methods.views import Decision, Evict, Field, Offload, PrefillView

Call = Literal["prefill", "after_prefill", "decode"]
_NOT_BY: dict[Call, tuple[str, ...]] = {
    "prefill": ("evict",),
    "after_prefill": ("keys", "values", "fields", "evict", "stream", "earlier"),
    "decode": ("keys", "values", "fields", "offload", "chunks", "stream", "earlier"),
}
_NOT_EARLIER = ("keys", "values", "fields", "evict", "offload", "chunks", "stream", "earlier")
_PLACES, _SUMMARIES, _DIGESTS = ("host", "device", "disk"), ("mean", "bounds"), ("model", "bf16", "int8", "int4")


def returned(method: Method, call: Call, decision: object) -> Decision:
    """Return what a call of the method returned, None as an empty decision.

    Raises:
        MethodError: not a `Decision`, or one that this call cannot make or that the method does not declare.
    """
    if decision is None:
        return Decision()
    if not isinstance(decision, Decision):
        raise MethodError(f"{method.name}: `{call}` must return a Decision or None, got {type(decision).__name__}")
    for name in _NOT_BY[call]:
        if _given(decision, name):
            raise MethodError(f"{method.name}: `{call}` cannot decide about {name}; {_advice(name)}")
    if call == "decode":
        if not method.evicts_while_decoding and (decision.keep is not None or decision.evict is not None):
            raise MethodError(f'{method.name}: `decode` evicts, so `decides` must contain "decode"')
        return decision
    if (decision.keys is not None or decision.values is not None) and not method.merges:
        raise MethodError(f"{method.name}: `{call}` replaces keys or values, so `merges` must be True")
    if decision.offload is not None and not method.retrieves:
        raise MethodError(f'{method.name}: `{call}` offloads chunks, so `decides` must contain "read"')
    return decision


def decisions_of_layers(method: Method, taken: object, layers: int) -> list[Decision]:
    """Return what `after_prefill` returned, one decision per layer.

    Raises:
        MethodError: no list, a wrong number of decisions, or a wrong one.
    """
    if taken is None:
        return [Decision()] * layers
    if not isinstance(taken, (list, tuple)):
        raise MethodError(
            f"{method.name}: `after_prefill` must return one Decision per layer or None, got {type(taken).__name__}"
        )
    if len(taken) != layers:
        raise MethodError(f"{method.name}: after_prefill returned {len(taken)} decisions for {layers} layers")
    return [returned(method, "after_prefill", each) for each in taken]


def check_prefill(method: str, decision: Decision, view: PrefillView) -> None:
    """Raise `MethodError` where a decision of `prefill` does not fit its view."""
    batch, heads, columns = view.keys.shape[:3]
    check_keep(method, decision.keep, (batch, heads, columns))
    for what, new, old in (("keys", decision.keys, view.keys), ("values", decision.values, view.values)):
        if new is not None and (not _is(new, old.dtype) or new.shape != old.shape):
            raise MethodError(f"{method}: replaced {what} must be {_words(old)}, got {_words(new)}")
    if not isinstance(decision.fields, dict):
        raise MethodError(f"{method}: fields must be a dict of Field, got {_words(decision.fields)}")
    for name, each in decision.fields.items():
        if name == RESIDUAL:
            raise MethodError(f"{method}: the field name {name!r} is reserved for quantized slots; choose another")
        if not isinstance(each, Field) or not isinstance(each.dtype, torch.dtype):
            raise MethodError(f"{method}: fields[{name!r}] must be a Field, got {_words(each)}")
        if each.values is not None and (
            not isinstance(each.values, Tensor) or each.values.shape != (batch, heads, columns)
        ):
            raise MethodError(
                f"{method}: fields[{name!r}] must have values [{batch}, {heads}, {columns}], got {_words(each.values)}"
            )
    _check_offload(method, decision, batch, heads)
    stream = decision.stream
    if stream is not None and (not _is(stream, torch.bool) or stream.shape != (batch, columns)):
        raise MethodError(f"{method}: stream must be bool [{batch}, {columns}], got {_words(stream)}")


def check_earlier(method: str, earlier: object, layers: Sequence[tuple[int, int, int]]) -> list[Tensor | None]:
    """Return what `Decision.earlier` keeps in each of the compressed layers before the deciding one.

    layers: (B, H, C) of each of them.

    Raises:
        MethodError: no list of one decision per layer, a decision about anything but `keep`, or a wrong mask.
    """
    if not isinstance(earlier, (list, tuple)) or len(earlier) != len(layers):
        what = f"{len(earlier)} decisions" if isinstance(earlier, (list, tuple)) else type(earlier).__name__
        raise MethodError(
            f"{method}: `earlier` must be a list of {len(layers)} decisions, one per earlier layer; got {what}"
        )
    found = []
    for each, shape in zip(earlier, layers, strict=True):
        if not isinstance(each, Decision):
            raise MethodError(f"{method}: `earlier` must hold a Decision per layer, got {type(each).__name__}")
        for name in _NOT_EARLIER:
            if _given(each, name):
                raise MethodError(f"{method}: `earlier` cannot decide about {name}; it has `keep` only")
        check_keep(method, each.keep, shape)
        found.append(each.keep)
    return found


def check_stream_layer(method: Method, compressed_idx: int) -> None:
    """Raise `MethodError` unless the method declares to prune the residual stream after this compressed layer."""
    after = method.prunes_after
    if compressed_idx != after:
        declared = "no layer" if after is None else f"layer {after}"
        raise MethodError(
            f"{method.name}: `prefill` of compressed layer {compressed_idx} prunes the residual stream, and "
            f"prunes_after declares {declared}"
        )


def check_further(method: str, decision: Decision, batch: int, heads: int) -> None:
    """Raise `MethodError` where a decision about a further block asks for what it cannot have, or does not fit."""
    if decision.stream is not None:
        raise MethodError(f"{method}: the residual stream of a further block cannot be pruned; leave `stream` out")
    _check_offload(method, decision, batch, heads)


def check_settled(
    method: str, decision: Decision, segments: Segments, store: ChunkStore | None, shape: tuple[int, int, int]
) -> None:
    """Raise `MethodError` where a decision of `after_prefill` does not fit a layer; shape: (B, H, C)."""
    check_keep(method, decision.keep, shape)
    _check_offload(method, decision, *shape[:2])
    if decision.offload is None:
        return
    if store is not None:
        raise MethodError(f"{method}: `after_prefill` offloads chunks of a layer whose chunks `prefill` has offloaded")
    positions = segments.positions()
    if not bool((positions == positions[:, :1]).all()):
        raise MethodError(
            f"{method}: `after_prefill` can offload chunks only where all heads store the same tokens; "
            "keep them in `prefill`, or offload there"
        )


def check_keep(method: str, keep: Tensor | None, shape: tuple[int, int, int]) -> None:
    """Raise `MethodError` unless keep is None, bool [B, H, n] or bool [B, 1, n]; shape: (B, H, n)."""
    if keep is None:
        return
    batch, heads, width = shape
    if not _is(keep, torch.bool) or keep.shape not in ((batch, heads, width), (batch, 1, width)):
        raise MethodError(f"{method}: keep must be bool [{batch}, {heads} or 1, {width}], got {_words(keep)}")


def check_evict(method: str, evict: Evict, segments: Segments) -> None:
    """Raise `MethodError` where single slots to evict do not fit the stored ones."""
    if not isinstance(evict, Evict):
        raise MethodError(f"{method}: evict must be an Evict, got {_words(evict)}")
    slots, counts = evict.slots, evict.counts
    uniform = segments.runs.uniform  # then `Segments.evict` finds slots that are not stored
    lengths = segments.sequence_lengths if uniform else segments.lengths.amin(1).tolist()  # of the shortest heads
    if not isinstance(counts, (list, tuple)) or not all(type(count) is int for count in counts):
        raise MethodError(
            f"{method}: Evict.counts must be a list of {len(lengths)} whole numbers, got {_words(counts)}"
        )
    most, least = 1, min((length for length, count in zip(lengths, counts, strict=False) if count), default=0)
    if isinstance(slots, Tensor):
        batch, heads = segments.batch, segments.heads
        if slots.dtype != torch.int64 or slots.dim() != 3 or slots.shape[:2] not in ((batch, heads), (batch, 1)):
            raise MethodError(f"{method}: Evict.slots must be int64 [{batch}, {heads} or 1, n], got {_words(slots)}")
        most = slots.shape[-1]
    elif type(slots) is not int or (least and not 0 <= slots < least):
        raise MethodError(f"{method}: Evict.slots names slot {slots!r}, and {least} slots are stored")
    if len(counts) != len(lengths) or any(
        not 0 <= count <= min(most, length) for count, length in zip(counts, lengths, strict=True)
    ):
        raise MethodError(
            f"{method}: Evict.counts must be {len(lengths)} numbers, at most {most} each and no more than the "
            f"{lengths} slots that the shortest heads store; got {counts}"
        )
    if isinstance(slots, Tensor) and slots.device.type == "cpu" and most > uniform:
        _check_slots(method, slots, counts, segments)


def _check_slots(method: str, slots: Tensor, counts: Sequence[int], segments: Segments) -> None:
    """Raise `MethodError` where a named slot is not stored in its head, or is named twice."""
    within = (torch.arange(slots.shape[-1]) < torch.tensor(counts)[:, None])[:, None].expand_as(slots)
    stored = segments.lengths[:, : slots.shape[1]] if slots.shape[1] > 1 else segments.lengths.amin(1, keepdim=True)
    if bool((within & ((slots < 0) | (slots >= stored[..., None]))).any()):
        raise MethodError(f"{method}: Evict.slots names slots that are not stored in their head")
    if slots.shape[-1] > 1:
        # entries beyond a sequence's count get numbers of their own
        ordered = torch.where(within, slots, -1 - torch.arange(slots.shape[-1])).sort(dim=-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise MethodError(f"{method}: Evict.slots names a slot twice in one head")


def check_relevance(method: str, relevance: object, store: ChunkStore) -> None:
    """Raise `MethodError` unless `read` returned a number for every chunk of every row, [n, P]."""
    shape = store.choosing, store.digests.shape[-1]
    if not isinstance(relevance, Tensor) or relevance.shape != shape or not relevance.is_floating_point():
        raise MethodError(f"{method}: `read` must return floating-point {list(shape)}, got {_words(relevance)}")


def _check_offload(method: str, decision: Decision, batch: int, heads: int) -> None:
    offload, chunks = decision.offload, decision.chunks
    if offload is not None:
        if not isinstance(offload, Offload):
            raise MethodError(f"{method}: offload must be an Offload, got {_words(offload)}")
        if not _is(offload.heads, torch.bool) or offload.heads.shape != (batch, heads):
            raise MethodError(f"{method}: Offload.heads must be bool [{batch}, {heads}], got {_words(offload.heads)}")
        if type(offload.chunk) is not int or offload.chunk < 1:
            raise MethodError(f"{method}: Offload.chunk must be a whole number, at least 1; got {offload.chunk!r}")
        choices = (("place", _PLACES), ("summary", _SUMMARIES), ("digest_dtype", _DIGESTS))
        for name, known in choices:
            if getattr(offload, name) not in known:
                raise MethodError(
                    f"{method}: Offload.{name} must be one of {', '.join(known)}; got {getattr(offload, name)!r}"
                )
    if chunks is not None and (not _is(chunks, torch.int64) or chunks.shape != (batch, heads)):
        raise MethodError(f"{method}: chunks must be int64 [{batch}, {heads}], got {_words(chunks)}")
    if chunks is not None and bool((chunks < 0).any()):
        raise MethodError(f"{method}: chunks must not be negative")


def check_reserve(method: str, segments: Segments, store: ChunkStore, chunks: Tensor) -> None:
    """Raise `MethodError` where offloaded chunks were decided before, or where a token would be attended to twice."""
    if store.reserved:
        raise MethodError(f"{method}: `chunks` of a layer are decided once, by `prefill` or by `after_prefill`")
    if store.overlaps(segments.positions(), chunks):
        raise MethodError(
            f"{method}: a head keeps tokens on the device that are also in its offloaded chunks; `keep` must leave "
            "them out"
        )


def check_complete(method: str, decision: Decision, store: ChunkStore | None) -> None:
    """Raise `MethodError` where, once the prompt is settled, chunks are stored that no step would ever read."""
    if store is None and decision.chunks is not None and bool((decision.chunks > 0).any()):
        raise MethodError(f"{method}: `chunks` without `offload`: this layer has no offloaded chunks to read")
    if store is not None and not store.reserved:
        raise MethodError(f"{method}: `offload` without `chunks`: no step would read what was offloaded")


def _given(decision: Decision, name: str) -> bool:
    value = getattr(decision, name)
    return bool(value) if name == "fields" else value is not None


def _advice(name: str) -> str:
    if name == "evict":
        return "return a mask in `keep`"
    return "`prefill` can" if name not in ("offload", "chunks") else "`prefill` and `after_prefill` can"


def _is(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype


def _words(value: object) -> str:
    """What a value is, for messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{type(value).__name__} {value!r}"
