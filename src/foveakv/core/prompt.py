"""Map of the prompt columns that are text, image, video, audio or padding.

A `PromptMap` is created once from the model's inputs and stored with the cache. Columns are counted as in `input_ids`,
padding included. Markers such as `<|vision_start|>` are text, since the model embeds them as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foveakv.errors import InputError

TEXT, IMAGE, VIDEO, AUDIO, PAD = 0, 1, 2, 3, -1

# Gemma3's processor names its modality ids `token_type_ids`. In PaliGemma, this name means prefix / suffix.
_TOKEN_TYPES_ARE_MODALITIES = ("gemma3", "shieldgemma2", "t5gemma2")


@dataclass(frozen=True)
class Span:
    """Columns [start, end) of one contiguous visual run.

    kind: IMAGE or VIDEO. index: number of the image (or video) in its sequence, from 0.
    """

    kind: int
    start: int
    end: int
    index: int

    @property
    def length(self) -> int:
        """Number of columns."""
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class PromptMap:
    """Map of the columns of a batch of prompts.

    Args:
        kinds: int8 [B, C], one of TEXT, IMAGE, VIDEO, AUDIO, PAD.
        index: int32 [B, C], the number of the image or video that a visual column belongs to, -1 elsewhere. If omitted,
            every contiguous run of one kind is one image or one video.

    Raises:
        InputError: the shapes are invalid.
    """

    kinds: Tensor
    index: Tensor = field(default=None)  # type: ignore[assignment]  # __post_init__ fills it

    def __post_init__(self) -> None:
        if self.kinds.dim() != 2:
            raise InputError(f"PromptMap needs kinds of shape [batch, columns], got {tuple(self.kinds.shape)}")
        if self.index is not None and self.index.shape != self.kinds.shape:
            raise InputError(
                f"PromptMap: index {tuple(self.index.shape)} must have the shape of kinds {tuple(self.kinds.shape)}"
            )
        object.__setattr__(self, "kinds", self.kinds.to(torch.int8))
        index = _number_runs(self.kinds) if self.index is None else self.index.to(torch.int32)
        object.__setattr__(self, "index", index)

    @property
    def batch(self) -> int:
        """Number of sequences, B."""
        return self.kinds.shape[0]

    @property
    def columns(self) -> int:
        """Number of columns, C, padding included."""
        return self.kinds.shape[1]

    @cached_property
    def real(self) -> Tensor:
        """Columns that are not padding: bool [B, C]."""
        return self.kinds != PAD

    @cached_property
    def text(self) -> Tensor:
        """Text columns, markers included: bool [B, C]."""
        return self.kinds == TEXT

    @cached_property
    def visual(self) -> Tensor:
        """Image and video columns: bool [B, C]."""
        return (self.kinds == IMAGE) | (self.kinds == VIDEO)

    @cached_property
    def lengths(self) -> Tensor:
        """Real tokens of each sequence: int64 [B]."""
        return self.real.sum(1)

    @cached_property
    def first_visual(self) -> Tensor:
        """Column of the first visual token, C if a sequence has none: int64 [B]."""
        columns = torch.arange(self.columns, device=self.kinds.device)
        return torch.where(self.visual, columns, self.columns).amin(1) if self.columns else self.lengths

    @cached_property
    def has_visual(self) -> bool:
        """Whether any sequence has visual tokens."""
        return bool(self.visual.any())

    @cached_property
    def place(self) -> Tensor:
        """Index of a visual column among those of its image or video, -1 elsewhere: int32 [B, C].

        The pieces of an image that markers separate are counted on.
        """
        found = torch.full_like(self.index, -1)
        for b in range(self.batch):
            columns = torch.nonzero(self.visual[b]).flatten()
            key = self.index[b, columns].long() * 4 + self.kinds[b, columns]
            count = torch.arange(len(columns), device=columns.device)
            first = torch.cat([key.new_ones(1, dtype=torch.bool), key[1:] != key[:-1]]) if len(key) else key.bool()
            start = torch.where(first, count, 0).cummax(0).values if len(key) else count
            found[b, columns] = (count - start).to(torch.int32)
        return found

    def spans(self, b: int) -> list[Span]:
        """Return the contiguous visual runs of sequence `b`, from left to right.

        An image whose tokens are separated by markers (the rows of Pixtral, the tiles of Idefics3) has one span per
        piece.
        """
        return self._spans[b]

    @cached_property
    def _spans(self) -> list[list[Span]]:
        rows = zip(self.kinds.tolist(), self.index.tolist(), strict=True)
        return [list(_runs(kinds, index)) for kinds, index in rows]

    def take(self, index: Tensor, valid: Tensor | None = None) -> PromptMap:
        """Gather columns: index int64 [B, n]. Columns become PAD where `valid`, bool [B, n], is False."""
        kinds, numbers = self.kinds.gather(1, index), self.index.gather(1, index)
        if valid is not None:
            kinds, numbers = (
                kinds.masked_fill(~valid, PAD),
                numbers.masked_fill(~valid, -1),
            )
        return PromptMap(kinds, numbers)

    def select(self, index: Tensor) -> PromptMap:
        """Gather sequences: index int64 [B']."""
        return PromptMap(self.kinds[index], self.index[index])

    def expand(self, beams: int) -> PromptMap:
        """Repeat each sequence `beams` times, in the order of the inputs that `generate` expands."""
        return PromptMap(
            self.kinds.repeat_interleave(beams, 0),
            self.index.repeat_interleave(beams, 0),
        )

    def concat(self, other: PromptMap) -> PromptMap:
        """Append the columns of `other`, a later turn or the next chunk of a prompt.

        Image numbers continue. Runs of the same kind on both sides of the boundary are one image split by the chunks.

        Raises:
            InputError: the numbers of sequences differ.
        """
        if other.batch != self.batch:
            raise InputError(f"cannot join prompts of {self.batch} and {other.batch} sequences")
        if not self.columns or not other.columns:
            return self if self.columns else other
        numbers = other.index.clone()
        for kind in (IMAGE, VIDEO):
            here = torch.where(self.kinds == kind, self.index, -1)
            touching = (self.kinds[:, -1] == kind) & (other.kinds[:, 0] == kind)
            offset = here.amax(1) + 1 - touching.to(torch.int32)
            numbers = torch.where(other.kinds == kind, numbers + offset[:, None], numbers)
        return PromptMap(torch.cat([self.kinds, other.kinds], 1), torch.cat([self.index, numbers], 1))

    def append(self, count: int, real: Tensor | None = None) -> PromptMap:
        """Append `count` text columns (decoded tokens); real: bool [B, count], False for padding."""
        kinds = self.kinds.new_full((self.batch, count), TEXT)
        if real is not None:
            kinds = kinds.masked_fill(~real, PAD)
        return self.concat(PromptMap(kinds))

    def to(self, device: torch.device | str) -> PromptMap:
        """Move the map to a device."""
        return PromptMap(self.kinds.to(device), self.index.to(device))

    @classmethod
    def from_inputs(
        cls,
        config: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        image_lengths: Sequence[Sequence[int]] | None = None,
    ) -> PromptMap:
        """Create the map from the model's inputs.

        Args:
            config: the model's configuration, with the placeholder ids. With None or a text model, everything is text.
            input_ids: integers [B, C].
            attention_mask: [B, >= C], 0 = padding; the last C columns of a longer mask (a later turn) are used.
            mm_token_type_ids: [B, C], 0 text, 1 image, 2 video, 3 audio. Takes precedence over the placeholder ids,
                except that markers which some processors count as image (row breaks, image start and end) are text.
            token_type_ids: [B, C]; used as modalities for the Gemma3 family only.
            image_lengths: for each sequence, the number of placeholder tokens of each of its images, in order. Needed
                to distinguish adjacent images, and to join the pieces of an image that markers separate.

        Raises:
            InputError: shapes or values of the inputs do not match.
        """
        _check_shape("input_ids", input_ids, None)
        kinds = _kinds_from_ids(config, input_ids)
        if mm_token_type_ids is None and str(getattr(config, "model_type", "")).startswith(_TOKEN_TYPES_ARE_MODALITIES):
            mm_token_type_ids = token_type_ids
        if mm_token_type_ids is not None:
            _check_shape("mm_token_type_ids", mm_token_type_ids, input_ids)
            kinds = _apply_modalities(kinds, mm_token_type_ids.to(input_ids.device))
        if attention_mask is not None:
            kinds = kinds.masked_fill(~_real_columns(attention_mask, input_ids), PAD)
        if image_lengths is None:
            return cls(kinds)
        return cls(kinds, _number_by_lengths(kinds, image_lengths))


def placeholder_ids(config: Any) -> dict[int, set[int]]:
    """Return the placeholder token ids in `config` (or one of its parts), by kind."""
    found: dict[int, set[int]] = {IMAGE: set(), VIDEO: set(), AUDIO: set()}
    for part in _parts(config):
        for kind, name in ((IMAGE, "image"), (VIDEO, "video"), (AUDIO, "audio")):
            for suffix in ("token_id", "token_index"):
                value = getattr(part, f"{name}_{suffix}", None)
                if isinstance(value, int) and not isinstance(value, bool):
                    found[kind].add(value)
        if any(found.values()) and part is config:
            break  # the sub-configurations may have unrelated defaults
    return found


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in ("vision_config", "audio_config", "thinker_config"):
        part = getattr(config, name, None)
        if part is not None:
            yield part


def _kinds_from_ids(config: Any, input_ids: Tensor) -> Tensor:
    kinds = torch.zeros_like(input_ids, dtype=torch.int8)
    ids = placeholder_ids(config)
    for kind, tokens in ids.items():
        for token in tokens:
            kinds = kinds.masked_fill(input_ids == token, kind)
    start, end = (
        getattr(config, "video_start_token_id", None),
        getattr(config, "video_end_token_id", None),
    )
    if isinstance(start, int) and isinstance(end, int):  # GLM-4V uses image tokens for the frames of a video
        inside = (input_ids == start).cumsum(1) > (input_ids == end).cumsum(1)
        kinds = kinds.masked_fill(inside & (kinds == IMAGE), VIDEO)
    return kinds


def _apply_modalities(kinds: Tensor, modalities: Tensor) -> Tensor:
    """Apply modality ids. If placeholder ids are known, other tokens marked as visual are markers and stay text."""
    modalities = modalities.to(torch.int8)
    if bool(((modalities < TEXT) | (modalities > AUDIO)).any()):
        raise InputError("mm_token_type_ids must be 0 (text), 1 (image), 2 (video) or 3 (audio)")
    known = kinds != TEXT
    agree = known & (modalities != TEXT)
    return torch.where(known, modalities, kinds) if bool(agree.any()) else modalities


def _real_columns(attention_mask: Tensor, input_ids: Tensor) -> Tensor:
    batch, columns = input_ids.shape
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < columns:
        raise InputError(
            f"attention_mask {tuple(attention_mask.shape)} does not fit input_ids {tuple(input_ids.shape)}; "
            "pass the [batch, columns] mask of the processor (1 = token, 0 = padding)"
        )
    return attention_mask[:, attention_mask.shape[1] - columns :].to(input_ids.device) != 0


def _check_shape(name: str, tensor: Tensor, like: Tensor | None) -> None:
    if tensor.dim() != 2 or (like is not None and tensor.shape != like.shape):
        wanted = "[batch, columns]" if like is None else str(tuple(like.shape))
        raise InputError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}")


def _number_runs(kinds: Tensor) -> Tensor:
    """Return the number of every visual column's run among the runs of its kind, -1 elsewhere: int32 [B, C]."""
    index = torch.full_like(kinds, -1, dtype=torch.int32)
    before = torch.nn.functional.pad(kinds, (1, 0), value=PAD)[:, :-1]
    for kind in (IMAGE, VIDEO):
        member = kinds == kind
        starts = member & (before != kind)
        index = torch.where(member, starts.cumsum(1, dtype=torch.int32) - 1, index)
    return index


def _number_by_lengths(kinds: Tensor, image_lengths: Sequence[Sequence[int]]) -> Tensor:
    if len(image_lengths) != kinds.shape[0]:
        raise InputError(f"image_lengths has {len(image_lengths)} rows for {kinds.shape[0]} sequences")
    index = _number_runs(kinds)
    counts = (kinds == IMAGE).sum(1).tolist()
    for b, lengths in enumerate(image_lengths):
        sizes = torch.as_tensor(list(lengths), dtype=torch.int64)
        if int(sizes.sum()) != counts[b] or bool((sizes <= 0).any()):
            raise InputError(
                f"image_lengths of sequence {b} are {sizes.tolist()} (sum {int(sizes.sum())}), "
                f"but the prompt holds {counts[b]} image tokens"
            )
        numbers = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(sizes)
        index[b, kinds[b] == IMAGE] = numbers.to(index.device)
    return index


def _runs(kinds: list[int], index: list[int]) -> Iterator[Span]:
    start = 0
    for end in range(1, len(kinds) + 1):
        if end < len(kinds) and (kinds[end], index[end]) == (
            kinds[start],
            index[start],
        ):
            continue
        if kinds[start] in (IMAGE, VIDEO):
            yield Span(kinds[start], start, end, index[start])
        start = end
