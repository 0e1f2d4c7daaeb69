"""Files of head scores: non-negative numbers [layers, KV heads], measured by `foveakv.analysis.head_scores`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.util.files import replacing, write_text


def save_head_scores(scores: Tensor, path: str | Path) -> None:
    """Write scores [layers, KV heads] to a .json or .safetensors file.

    Raises:
        MethodError: the scores or the suffix of the file are invalid.
        OutputError: the file cannot be written.
    """
    path = Path(path)
    scores = read_head_scores(scores, "head scores").to(torch.float32)
    if path.suffix == ".safetensors":
        from safetensors.torch import save

        with replacing(path) as temporary:
            temporary.write_bytes(save({"scores": scores.contiguous()}))
    elif path.suffix == ".json":
        write_text(path, json.dumps({"scores": scores.tolist()}) + "\n")
    else:
        raise MethodError(f"head scores are saved as .json or .safetensors, not as {path.name!r}")


def load_head_scores(path: str | Path) -> Tensor:
    """Read a file written by `save_head_scores`: float64 [layers, KV heads].

    Raises:
        MethodError: the file is missing, cannot be read, or has no valid scores.
    """
    path = Path(path)
    if not path.is_file():
        raise MethodError(
            f"head_scores: there is no file {path}; make it with foveakv.analysis.head_scores.visual_head_scores"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            found = json.loads(path.read_text(encoding="utf8"))
    except Exception as error:  # the errors of json and safetensors have no common base class
        raise MethodError(f"head_scores: {path} cannot be read: {error}") from error
    if isinstance(found, dict):
        if "scores" not in found:
            raise MethodError(f'head_scores: {path} has no "scores"; make it with foveakv.analysis.head_scores')
        found = found["scores"]
    return read_head_scores(found, f"head_scores: {path}")


def read_head_scores(values: Any, what: str) -> Tensor:
    """Convert numbers [layers][KV heads] to a float64 tensor. `what` names them in the message of an error.

    Raises:
        MethodError: the values are not a matrix of finite, non-negative numbers.
    """
    try:
        scores = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    except (ValueError, TypeError, RuntimeError) as error:
        raise MethodError(f"{what} must be numbers [layers][KV heads]: {error}") from error
    if scores.dim() != 2 or not scores.numel():
        raise MethodError(f"{what} must be numbers [layers][KV heads]; got shape {tuple(scores.shape)}")
    if not bool(torch.isfinite(scores).all()) or bool((scores < 0).any()):
        raise MethodError(f"{what} must be finite and not negative")
    return scores
