"""Find the layer by whose attention HAE chooses its visual tokens, without labels: by agreement with the full cache.

For every candidate layer, HAE keeps the same share of the visual tokens, chosen in that layer and dropped from all. Its
predictions along the full cache's replies are compared with the full cache's own. One prefill per prompt serves all
layers (`replay.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foveakv.engines.transformers.api import cache_for
from foveakv.engines.transformers.fingerprint import digest_of
from foveakv.errors import InputError
from foveakv.evaluation import environment
from foveakv.evaluation.bootstrap import Interval, interval, paired
from foveakv.evaluation.results import describe_error
from foveakv.methods import Method, calibration, get
from foveakv.methods.full import Full

if TYPE_CHECKING:
    from foveakv.evaluation.items import Item
    from foveakv.evaluation.trial import Bench

KEEP = 0.15
"""Share of the visual tokens that is kept while layers are compared."""
COARSE = 8
"""Number of layers that are tried first; then those beside the best."""
NEAR = 1.1
"""Largest KL, relative to the lowest, of a layer that is still as good as the best."""


@dataclass(frozen=True)
class LayerFigures:
    """One layer, as an index among the compressed layers.

    kl: mean over prompts of the divergence from the full cache, in nats per token. differs: mean over prompts of the
    share of the full cache's reply tokens that are not reproduced. own_kept: share of the visual tokens that other
    layers would choose and this layer's choice keeps, the mean over all layers that were tried; a cheap indicator that
    needs no decoding, which is reported and does not decide. scored: number of tokens that were compared.
    """

    layer: int
    kl: Interval
    differs: Interval
    own_kept: float
    scored: int


@dataclass(frozen=True)
class LayerCurve:
    """The figures of all layers that were tried, in order, and the layer that was chosen. depth: number of compressed
    layers. prompts: number of prompts that counted. skipped: errors of prompts that did not, such as "no images"."""

    figures: tuple[LayerFigures, ...]
    chosen: int
    depth: int
    keep: float
    prompts: int
    skipped: tuple[str, ...] = ()

    def at(self, layer: int) -> LayerFigures:
        """The figures of a layer."""
        return next(found for found in self.figures if found.layer == layer)


def depth_of(model: Any) -> int:
    """The number of compressed layers of a model."""
    return len(cache_for(model, Full()).compressed)


def hae(layer: int, keep: float, **options: Any) -> Method:
    """HAE that keeps a share of the visual tokens, chosen by one layer for all, and evicts nothing while decoding."""
    return get("hae", ddes=False, target_visual_tokens=keep, score_layer=layer, **options)


def spread(depth: int, count: int = COARSE) -> list[int]:
    """`count` layers at equal distances, the first included: 30 layers and 8 are 0, 4, 8, ..., 28."""
    step = max(1, math.ceil(depth / count))
    return list(range(0, depth, step))


def beside(chosen: int, tried: Sequence[int], depth: int) -> list[int]:
    """The untried layers between the tried neighbours of a layer."""
    below = max((layer for layer in tried if layer < chosen), default=-1)
    above = min((layer for layer in tried if layer > chosen), default=depth)
    return [layer for layer in range(below + 1, above) if layer not in tried]


def choose(kls: Mapping[int, Mapping[int, float]]) -> int:
    """The layer of the lowest KL, or the earliest that is as good.

    A layer is as good as the best if the 95% interval, paired over prompts, of its KL minus the best one's includes 0
    and its mean KL is at most `NEAR` times the best one's. The earliest is chosen because deciding at layer k holds k
    uncompressed layers during the prefill.

    Args:
        kls: layer -> prompt -> KL in nats per token.
    """
    means = {layer: fmean(own.values()) for layer, own in kls.items()}
    best = min(means, key=lambda layer: (means[layer], layer))

    def as_good(layer: int) -> bool:
        if means[layer] > NEAR * means[best]:
            return False
        apart = paired(kls[layer], kls[best])
        return not apart.known or apart.low <= 0

    return min(layer for layer in kls if layer == best or as_good(layer))


def find_layer(
    bench: Bench,
    prompts: Sequence[Item],
    depth: int,
    *,
    layers: Sequence[int] | None = None,
    keep: float = KEEP,
    make: Callable[[int], Method] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LayerCurve:
    """Compares layers on prompts, and chooses one (`choose`).

    Args:
        bench: runs methods on prompts.
        prompts: of any kind; those to which HAE does not apply, or whose reply has no token to compare, are left out.
        depth: number of compressed layers.
        layers: those to try; None tries `COARSE` layers at equal distances, then those between the neighbours of the
            best one.
        keep: share of the visual tokens that is kept.
        make: layer -> method; None: `hae` with this share.
        progress: called with (prompts done, prompts) of all passes together.

    Raises:
        InputError: a layer does not exist, or no prompt can be compared; the message has the reasons.
    """
    if not 0 < keep < 1:
        raise InputError(f"the share of visual tokens to keep is between 0 and 1; got {keep}")
    wanted = sorted(set(spread(depth) if layers is None else layers))
    outside = [layer for layer in wanted if not 0 <= layer < depth]
    if outside or not wanted:
        raise InputError(f"the layers to try are 0 to {depth - 1}; got {', '.join(map(str, outside)) or 'none'}")
    method = make or (lambda layer: hae(layer, keep))
    tally = _Tally()
    passes = 1 if layers is not None else 2
    for number in range(passes):
        if number:
            wanted = beside(choose(tally.kl), list(tally.kl), depth)
        for place, item in enumerate(prompts if wanted else []):
            if progress is not None:
                progress(number * len(prompts) + place, passes * len(prompts))
            tally.add(bench, item, place, {layer: method(layer) for layer in wanted})
        if not tally.kl:
            reasons = "; ".join(dict.fromkeys(tally.skipped.values()))
            raise InputError(f"no prompt can be compared: {reasons or 'there are no prompts'}")
    return LayerCurve(
        tuple(tally.figures(layer) for layer in sorted(tally.kl)),
        choose(tally.kl),
        depth,
        keep,
        len(next(iter(tally.kl.values()))),
        tuple(tally.skipped.values()),
    )


def save(
    curve: LayerCurve, model: Any, name: str, options: Mapping[str, Any], command: str, path: Path | None = None
) -> Path:
    """Writes the calibration file that `score_layer="calibrated"` finds, and returns its path.

    Args:
        model: the model of the curve, which the file's digest identifies.
        name: of the model, for readers.
        options: of HAE, with which layers were compared.
        command: that was run, for readers.
        path: another file than the user's for this model.
    """
    method: Any = hae(curve.chosen, curve.keep, **options)
    versions = environment.versions()
    points = (
        {
            "layer": found.layer,
            "kl": found.kl.mean,
            "agreement": 1 - found.differs.mean,
            "own_kept": None if math.isnan(found.own_kept) else found.own_kept,
        }
        for found in curve.figures
    )
    found = calibration.ScoreLayers(
        name, digest_of(model), (curve.chosen,), curve.depth, curve.keep, method.criterion, method.rows,
        tuple(points), command,
        ", ".join(f"{package} {versions[package]}" for package in ("foveakv", "torch", "transformers")),
    )  # fmt: skip
    return calibration.save(found, path)


class _Tally:
    """kl, differs: layer -> prompt -> figure. chosen: prompt -> layer -> bool [C], the visual tokens that are kept."""

    def __init__(self) -> None:
        self.kl: dict[int, dict[int, float]] = {}
        self.differs: dict[int, dict[int, float]] = {}
        self.scored: dict[int, int] = {}
        self.chosen: dict[int, dict[int, Tensor]] = {}
        self.skipped: dict[int, str] = {}

    def add(self, bench: Bench, item: Item, place: int, methods: Mapping[int, Method]) -> None:
        found = bench.follow(item, list(methods.values()))
        errors = [one for one in found if isinstance(one, Exception)]
        good = [one for one in found if not isinstance(one, Exception)]
        if errors or any(one.agreement.kl is None for one in good):  # all layers are compared on the same prompts
            reason = describe_error(errors[0]) if errors else "the reply has no token to compare"
            self.skipped[place] = reason
            return
        for layer, one in zip(methods, good, strict=True):
            self.kl.setdefault(layer, {})[place] = one.agreement.kl or 0.0
            self.differs.setdefault(layer, {})[place] = 1 - one.agreement.equal
            self.scored[layer] = self.scored.get(layer, 0) + one.agreement.scored
            self.chosen.setdefault(place, {})[layer] = (one.kept > 0.5) & one.visual

    def figures(self, layer: int) -> LayerFigures:
        overlaps = [
            float((own[layer] & other).sum() / other.sum())
            for own in self.chosen.values()
            for their, other in own.items()
            if their != layer and layer in own and bool(other.any())
        ]
        return LayerFigures(
            layer,
            interval(list(self.kl[layer].values())),
            interval(list(self.differs[layer].values()), shares=True),
            fmean(overlaps) if overlaps else math.nan,
            self.scored[layer],
        )
