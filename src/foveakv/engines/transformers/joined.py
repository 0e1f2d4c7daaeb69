"""One forward pass of a batch that is made of several requests' caches.

`JoinedCache([a, b, c])` is passed to the model with one new token for each sequence of its members, in order. The
model's matrix products run once for the whole batch; attention runs for each member by itself, over the slots that it
stores, under its own method. No key or value is copied, and no padding is stored: a request joins or leaves by making
another `JoinedCache` for the next step, which costs one small object for each layer.

    joined = JoinedCache([a, b])
    logits = model(input_ids=torch.tensor([[token_a], [token_b]]), past_key_values=joined).logits[:, -1]
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.handle import KVHandle
from foveakv.engines.transformers.joined_positions import next_positions, padding_of
from foveakv.engines.transformers.joined_windows import attend_window
from foveakv.engines.transformers.layer import CompressedLayer
from foveakv.engines.transformers.masks import LazyMask, Mask
from foveakv.errors import CacheInUseError, MembersFailedError, UnsupportedModelError


def problem(cache: CompressedCache) -> str | None:
    """Why a cache cannot be a member of any `JoinedCache`; None if it can."""
    if cache.preallocated is not None:
        return "it was made with preallocate=, whose steps are compiled for one batch; make it without"
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, (CompressedLayer, compat.DynamicLayer)):
            return (
                f"layer {number} of this model has a {type(layer).__name__}, whose state is not keys and values; run "
                "its decode steps one cache at a time"
            )
    return None


class JoinedCache(compat.Cache):
    """The caches of several requests, for one decode step of one token for each of their sequences.

    Members may differ in everything: method, options, length, number of sequences. Their traces, reports and step times
    go on; a step counts with the time of the whole pass.

    When the code of one member raises (a method, or its store on disk), the pass is completed for the others, and then
    `MembersFailedError` is raised, with the output and the errors. The failed member must be dropped: its next use
    raises `CacheInUseError`. When the pass itself fails (out of memory, an interrupt), every member that had begun it
    is refused from then on.
    """

    def __init__(self, members: Sequence[CompressedCache]) -> None:
        """Check the members; nothing is changed.

        Raises:
            CacheInUseError: no member, the same one twice, members of different models, one without a complete prompt,
                or one whose latest pass failed.
            UnsupportedModelError: a member cannot be joined, see `problem`.
        """
        self.members = list(members)
        _check(self.members)
        self.errors: dict[int, Exception] = {}
        self.rows: list[slice] = []
        self.masks: list[LazyMask | None] = []
        self.seen: list[int] = []  # tokens of each member, the new one included
        self.changed = False  # whether the members' storage has been touched
        first = 0
        for member in self.members:
            batch = member.full_prompt.batch
            self.rows.append(slice(first, first + batch))
            first += batch
        super().__init__(layers=[JoinedLayer(self, number) for number in range(len(self.members[0].layers))])

    @property
    def batch(self) -> int:
        """Number of sequences of all members."""
        return self.rows[-1].stop

    @property
    def owner(self) -> weakref.ref[Any] | None:
        """The model that the members were made for."""
        return self.members[0].owner

    def position_ids(self, device: torch.device) -> Tensor:
        """The position of each sequence's next token, int64 [B, 1], for models with and without M-RoPE."""
        return torch.cat([next_positions(member, device) for member in self.members])

    @contextmanager
    def step(self, itemsize: int) -> Iterator[None]:
        """Around the forward pass. itemsize: bytes of one key element."""
        begun: list[CompressedCache] = []
        self.errors, self.changed = {}, False
        try:
            for member, rows in zip(self.members, self.rows, strict=True):
                member.begin_forward(1, None, None, itemsize, batch=rows.stop - rows.start)
                begun.append(member)
            self.masks = [padding_of(member) for member in self.members]
            self.seen = [member.seen + 1 for member in self.members]
            yield
        except BaseException:
            if not self.changed:  # nothing was stored: the members are as before
                for member in begun:
                    member.forward_tokens = None
                    if member.trace is not None:
                        member.trace.pop()
            raise
        for number, member in enumerate(self.members):
            if number not in self.errors:
                member.end_forward(member.model_state)

    def each(self, run: Callable[[int, CompressedCache, slice], None]) -> None:
        """Call `run` with every member that has not failed, its number and its rows; an error is that member's own."""
        for number, (member, rows) in enumerate(zip(self.members, self.rows, strict=True)):
            if number in self.errors:
                continue
            try:
                run(number, member, rows)
            except torch.OutOfMemoryError:
                raise  # of the whole pass: the next member would meet it too
            except Exception as error:
                self.errors[number] = error

    def raise_errors(self, output: Any) -> None:
        """Raise `MembersFailedError` if a member failed during the step."""
        if self.errors:
            numbers = ", ".join(map(str, self.errors))
            first = next(iter(self.errors.values()))
            raise MembersFailedError(
                f"{len(self.errors)} of {len(self.members)} members of a joined step failed (number {numbers}); drop "
                f"them and go on with the others, whose logits are in `output`: {type(first).__name__}: {first}",
                output,
                dict(self.errors),
            ) from first


def _check(members: Sequence[CompressedCache]) -> None:
    if not members:
        raise CacheInUseError("a JoinedCache needs at least one cache")
    wrong = next((member for member in members if not isinstance(member, CompressedCache)), None)
    if wrong is not None:
        raise CacheInUseError(
            f"the members of a JoinedCache are caches of foveakv.cache_for or of a session, got {type(wrong).__name__}"
        )
    if len({id(member) for member in members}) < len(members):
        raise CacheInUseError("a cache can be only once in a JoinedCache; cache.fork() gives a second one")
    owners = {id(member.owner() if member.owner is not None else None) for member in members}
    if len(owners) > 1:
        raise CacheInUseError("the members of a JoinedCache must have been made for the same model")
    for number, member in enumerate(members):
        if (reason := problem(member)) is not None:
            raise UnsupportedModelError(f"member {number} cannot be joined: {reason}")
        if not member.prefilled:
            raise CacheInUseError(f"member {number} has no complete prompt yet; run its prompt alone, then join it")
        if member.forward_tokens is not None:
            raise CacheInUseError(f"an earlier forward pass of member {number} failed; drop it")


class JoinedLayer(compat.CacheLayerMixin):
    """One layer of a `JoinedCache`: gives every member's layer its rows."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, joined: JoinedCache, layer_idx: int) -> None:
        super().__init__()
        self._joined = weakref.ref(joined)  # weak: a reference cycle would delay freeing the members' memory
        self.layer_idx = layer_idx
        self.is_sliding = bool(getattr(joined.members[0].layers[layer_idx], "is_sliding", False))
        self.is_initialized = True
        self._returned: list[Any] = []  # what the members' layers gave for this step: handles, or windows of tensors

    @property
    def cache(self) -> Any:
        """The joined cache."""
        joined = self._joined()
        if joined is None:
            raise CacheInUseError("the JoinedCache of this layer no longer exists; keep a reference to it")
        return joined

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the members' layers allocate their storage."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[KVHandle, KVHandle]:
        """Give every member its new key [1, H, 1, D] and value; return a handle for the attention function."""
        joined: JoinedCache = self.cache
        if joined.members[0].forward_tokens is None:
            raise CacheInUseError("a JoinedCache is passed to the model that its members were made for, nothing else")
        joined.changed = True
        self._returned = [None] * len(joined.members)

        def run(number: int, member: CompressedCache, rows: slice) -> None:
            layer = member.layers[self.layer_idx]
            self._returned[number] = layer.update(key_states[rows], value_states[rows], *args, **kwargs)

        joined.each(run)
        handle = KVHandle(self)
        return handle, handle

    def attend(self, query: Tensor, mask: Mask | None, scaling: float) -> Tensor:
        """Attend with query [B, Hq, 1, D], every member by itself; return [B, 1, Hq, Dv], zeros for failed members."""
        joined: JoinedCache = self.cache
        outputs: list[Tensor | None] = [None] * len(joined.members)

        def run(number: int, member: CompressedCache, rows: slice) -> None:
            layer = member.layers[self.layer_idx]
            if isinstance(layer, CompressedLayer):
                outputs[number] = layer.attend(query[rows], joined.masks[number], scaling)
            else:
                keys, values = self._returned[number]
                outputs[number] = attend_window(query[rows], keys, values, member, joined.seen[number], scaling)

        joined.each(run)
        self._returned = []
        made = [output for output in outputs if output is not None]
        if len(made) < len(outputs):
            width = made[0].shape[-1] if made else query.shape[-1]
            for number, rows in enumerate(joined.rows):
                if outputs[number] is None:
                    outputs[number] = query.new_zeros(rows.stop - rows.start, 1, query.shape[1], width)
        return torch.cat([output for output in outputs if output is not None])

    def end_prefill(self, query: Tensor, handle: Any, mask: Mask | None, scaling: float) -> None:
        """Never called: prompts are not read through a joined cache."""
        raise CacheInUseError("a prompt cannot be read through a JoinedCache; run it alone, then join it")

    def get_seq_length(self) -> int:
        """Return the most tokens that a member has seen."""
        return max(int(member.seen) for member in self.cache.members)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of the attention mask, which is described and never built."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length is not limited."""
        return -1

    def reset(self) -> None:
        """Do nothing: the members are reset by themselves."""
