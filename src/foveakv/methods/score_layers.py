"""Options that name scoring layers: an index, a share of the depth, several layers, "calibrated", or a file."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from foveakv.errors import MethodError
from foveakv.methods import calibration
from foveakv.methods.base import ModelFacts

CALIBRATED = "calibrated"
_EXPECTED = (
    'must be a layer counted from 0 (16), a share of the depth (0.5), several layers ("8,12,16"), "calibrated", or a '
    "calibration file (its name ends in .json)"
)


@dataclass(frozen=True)
class Chosen:
    """Scoring layers of one model.

    layers: indices among the compressed layers, ascending. source: where they come from, for reports; empty where the
    user named them.
    """

    layers: tuple[int, ...]
    source: str = ""

    @property
    def single(self) -> int:
        """The middle one, for methods that score in one layer."""
        return self.layers[len(self.layers) // 2]


def check_layers(name: str, option: str, value: Any) -> None:
    """Raise `MethodError` unless `value` can name layers; name: of the method. Nothing is read."""
    _parsed(name, option, value)


def named_layers(value: Any) -> tuple[int, ...] | None:
    """Return the layers of a valid value that needs no model, an index or several; else None."""
    found = _parsed("", "", value)
    return found if isinstance(found, tuple) else None


def choose_layers(name: str, option: str, value: Any, model: ModelFacts) -> Chosen:
    """Return the layers that a valid `value` stands for in a model.

    Raises:
        MethodError: the model does not have them, or the calibration file is damaged or of another depth.
    """
    found, depth = _parsed(name, option, value), len(model.layers)
    if isinstance(found, float):
        return Chosen((min(int(found * depth + 1e-9), depth - 1),), f"{found:g} of the depth of {depth} layers")
    if isinstance(found, tuple):
        chosen = Chosen(found)
    elif found is None:
        calibrated = calibration.find(model.digest())
        if calibrated is None:
            return Chosen(
                (calibration.rule_of_thumb(depth),),
                "a rule of thumb, half of the depth, since there is no calibration file for this model (make one with "
                "`foveakv tune --score-layer`)",
            )
        if calibrated.depth != depth:
            raise MethodError(
                f"{name}: the calibration file of this model is of {calibrated.depth} layers, and {depth} are "
                "compressed; make it anew with `foveakv tune --score-layer`"
            )
        chosen = Chosen(calibrated.layers, calibration.source(calibrated))
    else:
        file = calibration.read(found)
        if file.depth != depth:
            raise MethodError(
                f"{name}: {option}={value!r} is of a model that compresses {file.depth} layers; this one has {depth}"
            )
        other = "" if file.digest == model.digest() else f", which was made for other weights ({file.model})"
        chosen = Chosen(file.layers, f"{found}{other}")
    if chosen.layers[-1] >= depth:
        raise MethodError(
            f"{name}: {option} names layer {chosen.layers[-1]}; this model compresses {depth}, counted from 0 to "
            f"{depth - 1}"
        )
    return chosen


def _parsed(name: str, option: str, value: Any) -> float | tuple[int, ...] | Path | None:
    """Return a share, layers, the path of a file, or None for "calibrated"."""
    given = value
    if isinstance(value, str):
        text = value.strip().strip("()[]")
        if text == CALIBRATED:
            return None
        if text.endswith(".json"):
            return Path(value.strip()).expanduser()
        try:
            value = tuple(int(part) for part in text.replace("+", ",").split(",") if part.strip())
        except ValueError:
            try:
                value = float(text)
            except ValueError:
                value = ()
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = (int(value),)
    if isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= 1:
        return float(value)
    if isinstance(value, (tuple, list)) and value:
        whole = [int(each) for each in value if isinstance(each, Integral) and not isinstance(each, bool)]
        if len(whole) == len(value) == len(set(whole)) and min(whole) >= 0:
            return tuple(sorted(whole))
    raise MethodError(f"{name}: {option} {_EXPECTED}; got {given!r}")
