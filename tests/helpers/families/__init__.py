"""Tiny random-weight models of every family, and prompts for them.

`build("qwen2_5_vl")` gives a four-layer model in a few hundredths of a second, `prompt("qwen2_5_vl", images=2)` the
inputs that `generate` takes, `batch(...)` left-padded rows with different images together with the same rows alone, and
`first_turn` and `next_turn` the inputs of a conversation. Nothing is downloaded.

A row is described by its parts: an int is that many text tokens, a `Picture` is one image, a `Clip` is one video.
Tokens and pixels are drawn from the row's and the picture's own seed, so a row is the same alone and inside a batch.

The families are registered in `mrope`, `llava`, `others`, `doubtful` and `text`, grouped by how their images become
tokens.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import transformers as hf
from transformers.generation import utils as generation

from families import doubtful, llava, mrope, others, text  # noqa: F401  (each registers its families)
from families.models import accepts, build
from families.prompts import batch, encode, prompt, row, token_types, words
from families.registry import FAMILIES, Family, language
from families.rows import (
    AUDIO,
    BOS,
    BREAK,
    END,
    EOS,
    HEADS,
    HIDDEN,
    IMAGE,
    KV_HEADS,
    LAYERS,
    PAD,
    START,
    TEXT_IDS,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    VOCABULARY,
    Batch,
    Clip,
    Inputs,
    Picture,
    Row,
)
from families.turns import Turn, first_turn, next_turn

__all__ = [
    "AUDIO",
    "BOS",
    "BREAK",
    "DOUBTFUL",
    "END",
    "EOS",
    "FAMILIES",
    "HEADS",
    "HIDDEN",
    "IMAGE",
    "IMAGES_IN_CHUNKS",
    "KV_HEADS",
    "LAYERS",
    "PAD",
    "PLAIN",
    "START",
    "TEXT",
    "TEXT_IDS",
    "VIDEO",
    "VIDEO_END",
    "VIDEO_START",
    "VISUAL",
    "VOCABULARY",
    "Batch",
    "Clip",
    "Family",
    "Inputs",
    "Picture",
    "Row",
    "Turn",
    "accepts",
    "batch",
    "build",
    "encode",
    "exactness",
    "first_turn",
    "hf",
    "images_in_chunks",
    "language",
    "next_turn",
    "prompt",
    "row",
    "token_types",
    "words",
]

IMAGES_IN_CHUNKS = "mm_encoder_outputs" in generation.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
images_in_chunks = pytest.mark.skipif(
    not IMAGES_IN_CHUNKS, reason="this transformers loses the images of a prefill in chunks; we refuse it"
)

VISUAL = [name for name, family in FAMILIES.items() if family.pixels is not None and not family.doubtful]
DOUBTFUL = [name for name, family in FAMILIES.items() if family.doubtful]
TEXT = [name for name, family in FAMILIES.items() if family.pixels is None]
PLAIN = VISUAL + TEXT  # every family without reservations


def exactness(name: str) -> float:
    """How close two computations of the same logits come in fp64: linear attention sums in fp32, chunk by chunk."""
    return 5e-5 if name == "qwen3_5" else 1e-6
