"""Token ids of the tiny models, and the rows that prompts are made of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Inputs = dict[str, Tensor]

VOCABULARY = 300
PAD, BOS, EOS = 0, 1, 2
TEXT_IDS = range(10, 280)  # ordinary words; everything outside stands for something and is never generated
IMAGE, VIDEO, START, END, BREAK, AUDIO, VIDEO_START, VIDEO_END = 290, 291, 292, 293, 294, 295, 296, 297
LAYERS, HIDDEN, HEADS, KV_HEADS = 4, 64, 4, 2


@dataclass(frozen=True)
class Picture:
    """One image: `size` is an index into the family's sizes, `seed` draws the pixels."""

    size: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Clip:
    """One video of `frames` frames, for the families whose spec has `video=True`."""

    frames: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Row:
    parts: tuple[int | Picture | Clip, ...]
    seed: int = 0

    @property
    def pictures(self) -> list[Picture]:
        return [part for part in self.parts if isinstance(part, Picture)]

    @property
    def clips(self) -> list[Clip]:
        return [part for part in self.parts if isinstance(part, Clip)]


@dataclass(frozen=True)
class Batch:
    """`inputs` is the left-padded batch; `singles[i]` is row i alone; `pads[i]` how many pad tokens row i got."""

    inputs: Inputs
    singles: list[Inputs]
    pads: list[int]
    rows: list[Row]
