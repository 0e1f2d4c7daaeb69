"""Calibration files: the layer of a model whose attention tells best which visual tokens an answer needs.

`foveakv tune --score-layer` measures it and writes the file; `score_layer="calibrated"` finds it by the digest of the
model, first in the user's folder, then among the files that the package ships.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from foveakv.errors import MethodError
from foveakv.util.cache_folder import cache_folder
from foveakv.util.files import write_text

SHIPPED = Path(__file__).parent / "data" / "score_layers"


@dataclass(frozen=True)
class ScoreLayers:
    """The layers that decide which visual tokens stay, measured for one model.

    Args:
        model: name, for readers.
        digest: identifies the model, 64 hex digits (`foveakv.engines.transformers.fingerprint.digest_of`).
        layers: the chosen layers, ascending, counted from 0 among the compressed ones; scores are averaged over them.
        depth: number of compressed layers.
        keep: share of the visual tokens that were kept when the layers were compared.
        criterion, rows: the options of HAE that they were compared with.
        curve: for every layer that was tried {"layer", "kl", "agreement", "own_kept"}: the KL divergence from the full
            cache over the answers, the share of equal next tokens, and how much of the layers' own best tokens its
            choice keeps; a number that was not measured is None.
        command: the command that made the file.
        versions: of foveakv, torch and transformers, as one string.
    """

    model: str
    digest: str
    layers: tuple[int, ...]
    depth: int
    keep: float
    criterion: str = "dual"
    rows: str = "mean"
    curve: tuple[dict[str, Any], ...] = ()
    command: str = ""
    versions: str = ""


def user_folder() -> Path:
    """Return the folder of the user's calibration files: `$FOVEAKV_CACHE/score-layers`, see `cache_folder`."""
    return cache_folder("score-layers")


def user_file(digest: str) -> Path:
    """Return the user's file for a model."""
    return user_folder() / f"{digest[:16]}.json"


def find(digest: str) -> ScoreLayers | None:
    """Return the calibration of the model with this digest: the user's, else the shipped one, else None.

    Raises:
        MethodError: the user's file is damaged or belongs to another model.
    """
    path = user_file(digest)
    if path.is_file():
        found = read(path)
        if found.digest != digest:
            raise MethodError(f"calibration file {path}: digest is that of another model; remove the file")
        return found
    shipped = (read(file) for file in sorted(SHIPPED.glob("*.json")))
    return next((each for each in shipped if each.digest == digest), None)


def source(found: ScoreLayers) -> str:
    """Return where `find` has a calibration from, for reports: the path of the user's file, or the shipped file."""
    path = user_file(found.digest)
    return str(path) if path.is_file() else "the file that foveakv ships for this model"


def save(found: ScoreLayers, path: str | Path | None = None) -> Path:
    """Write a calibration file, whole or not at all, and return its path. path: None = the user's file for the model.

    Raises:
        MethodError: a field is invalid.
        OutputError: the file cannot be written.
    """
    path = user_file(found.digest) if path is None else Path(path)
    text = json.dumps(asdict(found), indent=1)
    _checked(json.loads(text), "calibration")
    write_text(path, text + "\n")
    return path


def read(path: str | Path) -> ScoreLayers:
    """Read a calibration file.

    Raises:
        MethodError: the file is missing, cannot be read, or one of its fields is missing or invalid; the message names
            the file and the field.
    """
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise MethodError(f"there is no calibration file {path}; make it with `foveakv tune --score-layer`") from None
    except (OSError, ValueError) as error:
        raise MethodError(f"calibration file {path} cannot be read: {error}") from error
    return _checked(values, f"calibration file {path}")


def rule_of_thumb(depth: int) -> int:
    """Return the deciding layer of a model without a calibration file: half of its `depth` compressed layers.

    Measured on the embedded model alone, where layers at 43 to 57% of the depth are best, with
    exceptions; no other model was measured.
    """
    return depth // 2


def _checked(values: Any, what: str) -> ScoreLayers:
    """Convert the values of a file; `what` names it in the message of an error."""
    if not isinstance(values, dict):
        raise MethodError(f"{what}: the content must be one JSON object")
    for each in fields(ScoreLayers):
        if each.name not in values:
            raise MethodError(f"{what}: the field {each.name!r} is missing")
        if not _VALID[each.name](values[each.name]):
            raise MethodError(f"{what}: the field {each.name!r} must be {_EXPECTED[each.name]}")
    found = ScoreLayers(**{each.name: values[each.name] for each in fields(ScoreLayers)})
    layers = tuple(found.layers)
    if layers[-1] >= found.depth:
        raise MethodError(f"{what}: the field 'layers' names layer {layers[-1]} of {found.depth}")
    object.__setattr__(found, "layers", layers)
    object.__setattr__(found, "curve", tuple(found.curve))
    return found


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def _ascending(value: Any) -> bool:
    whole = isinstance(value, list) and bool(value) and all(_whole(layer, 0) for layer in value)
    return whole and value == sorted(set(value))


def _points(value: Any) -> bool:
    def number(part: Any) -> bool:
        return part is None or (isinstance(part, (int, float)) and math.isfinite(part))

    return isinstance(value, list) and all(
        isinstance(point, dict) and _whole(point.get("layer"), 0) and all(number(part) for part in point.values())
        for point in value
    )


_VALID: dict[str, Any] = {
    "model": _text,
    "digest": lambda value: _text(value) and len(value) == 64 and all(digit in "0123456789abcdef" for digit in value),
    "layers": _ascending,
    "depth": lambda value: _whole(value, 1),
    "keep": _share,
    "criterion": lambda value: value in ("dual", "variance", "dual+variance"),
    "rows": lambda value: value in ("mean", "sum"),
    "curve": _points,
    "command": _text,
    "versions": _text,
}
_EXPECTED = {
    "model": "text",
    "digest": "64 hex digits",
    "layers": "a list of different whole numbers from 0, ascending",
    "depth": "a whole number above 0",
    "keep": "a number in (0, 1]",
    "criterion": "'dual', 'variance' or 'dual+variance'",
    "rows": "'mean' or 'sum'",
    "curve": "a list of objects with a whole number 'layer' and otherwise numbers or null",
    "command": "text",
    "versions": "text",
}
