"""Inputs of `generate`: single prompts and left-padded batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from families.models import accepts
from families.mrope import clip_inputs
from families.registry import FAMILIES, Family
from families.rows import BOS, END, IMAGE, PAD, START, TEXT_IDS, VIDEO, Batch, Clip, Inputs, Picture, Row


def words(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (count,), generator=generator).tolist()


def _ids(family: Family, row: Row) -> list[int]:
    ids = [BOS]
    for i, part in enumerate(row.parts):
        if isinstance(part, Picture):
            ids += family.tokens(part, len(row.pictures))
        elif isinstance(part, Clip):
            ids += [START, *[VIDEO] * (part.frames // 2 * 4), END]
        else:
            ids += words(part, 7919 * (row.seed + 1) + i)
    return ids


def token_types(name: str, ids: Tensor) -> Inputs:
    """The token type input of this family (empty where it takes none): 1 at image tokens, 2 at video tokens."""
    kind = FAMILIES[name].types
    if kind is None or not accepts(name, kind):
        return {}
    if name == "paligemma":
        return {kind: torch.zeros_like(ids)}
    return {kind: (ids == IMAGE).long() + 2 * (ids == VIDEO).long()}


def encode(name: str, rows: Sequence[Row], dtype: torch.dtype = torch.float32) -> Inputs:
    """Inputs of `generate` for these rows, left-padded to the longest."""
    family = FAMILIES[name]
    ids = [_ids(family, row) for row in rows]
    width = max(map(len, ids))
    input_ids = torch.tensor([[PAD] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    inputs: Inputs = {"input_ids": input_ids, "attention_mask": mask} | token_types(name, input_ids)
    if any(row.pictures for row in rows):
        assert family.pixels is not None, f"{name} takes no images"
        inputs |= family.pixels([row.pictures for row in rows])
    if any(row.clips for row in rows):
        assert family.video, f"{name} takes no videos here"
        inputs |= clip_inputs([clip for row in rows for clip in row.clips])
    if name == "mllama" and "pixel_values" in inputs:
        images = inputs["pixel_values"].shape[1]
        inputs["cross_attention_mask"] = torch.ones(len(rows), width, images, 1, dtype=torch.long)
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}


def row(name: str, images: int = 2, text: int = 9, seed: int = 0) -> Row:
    """A row with `images` images of different sizes (none: only text) and about `text` tokens around each."""
    family = FAMILIES[name]
    if family.pixels is None:
        return Row((text * 5,), seed)
    parts: list[int | Picture | Clip] = [max(text - 4, 2)]
    for i in range(images):
        parts += [Picture((i + seed) % family.sizes, 10 * seed + i), text]
    return Row(tuple(parts), seed)


def prompt(
    name: str, images: int = 2, *, dtype: torch.dtype = torch.float32, seed: int = 0, text: int = 9, video: bool = False
) -> Inputs:
    """One prompt of 40 to 90 tokens."""
    single = row(name, images, text, seed)
    if video:
        single = Row((*single.parts, Clip(seed=seed), text), seed)
    return encode(name, [single], dtype)


def batch(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Batch:
    """Three rows of different lengths: images differ in number and size where the family allows it."""
    family = FAMILIES[name]
    if family.pixels is None:
        rows = [Row((n,), seed + i) for i, n in enumerate((47, 21, 34))]
    elif family.mixed_counts:
        big, small = 0, family.sizes - 1
        rows = [
            Row((5, Picture(big, 1), 8, Picture(small, 2), 9), seed),
            Row((3, Picture(small, 3), 12), seed + 1),
            Row((4, Picture(big, 4), 6), seed + 2),
        ]
    else:
        rows = [Row((n, Picture(0, i), 2 * n), seed + i) for i, n in enumerate((11, 3, 8))]
    inputs = encode(name, rows, dtype)
    pads = (inputs["attention_mask"] == 0).sum(1).tolist()
    return Batch(inputs, [encode(name, [r], dtype) for r in rows], pads, rows)
