"""Find the smallest budget per method that agrees with the full cache on your own prompts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveakv.core.budget import parse_budget
from foveakv.errors import InputError, MethodError
from foveakv.evaluation.bootstrap import Interval, interval
from foveakv.evaluation.compare import candidates
from foveakv.evaluation.items import Item, Turn
from foveakv.evaluation.lines import PromptLine, read_lines
from foveakv.evaluation.results import does_not_apply
from foveakv.models.images import read_images

if TYPE_CHECKING:
    from foveakv.evaluation.compare import Candidate
    from foveakv.evaluation.results import Result
    from foveakv.evaluation.trial import Bench

BUDGETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
FEW = 20
"""Number of prompts below which the bound is weak, and a note says so."""


@dataclass(frozen=True)
class Tried:
    """The outcome of one budget of a method.

    loss: share of the full cache's reply tokens that the method does not reproduce, over prompts; upper: its upper
    bound, NaN if unknown. bytes, host: stored bytes, on the compute device and in the backing store, as shares of the
    full cache's. scored: number of tokens that were compared. errors: of the prompts that failed; skipped: number of
    prompts that the method does not apply to.
    """

    budget: float | int | str
    loss: Interval
    upper: float
    bytes: float
    host: float
    scored: int
    errors: tuple[str, ...]
    skipped: int = 0

    @property
    def total(self) -> float:
        """Stored bytes on device and host together, as a share of the full cache's; NaN if unknown."""
        return self.bytes + self.host

    def holds(self, most: float) -> bool:
        """Whether the upper bound of the loss is known and within `most`, and no prompt failed."""
        return not self.errors and self.upper <= most


@dataclass(frozen=True)
class Tuned:
    """The budgets of a method, largest first. most: the loss that is allowed. options: its other settings."""

    method: str
    options: dict[str, Any]
    tried: tuple[Tried, ...]
    most: float

    @property
    def nothing_judged(self) -> bool:
        """No token could be compared and nothing failed: all replies have at most one token."""
        return self.best is None and not any(tried.errors or tried.scored for tried in self.tried)

    @property
    def too_few(self) -> bool:
        """No budget holds although the loss of the largest is within `most`: there are too few tokens for the bound."""
        first = self.tried[0]
        return self.best is None and not first.errors and first.loss.mean <= self.most

    @property
    def best(self) -> Tried | None:
        """The smallest budget that holds together with all larger ones; None if there is none."""
        held = list(itertools.takewhile(lambda tried: tried.holds(self.most), self.tried))
        return held[-1] if held else None

    def config(self) -> str | None:
        """Python code that applies the best budget; None if no budget holds."""
        if self.best is None:
            return None
        settings = "".join(f", {key}={value!r}" for key, value in {**self.options, "budget": self.best.budget}.items())
        return f'foveakv.compress(model, foveakv.methods.get("{self.method}"{settings}))'


def read_prompts(folder: Path, max_new_tokens: int = 64, *, allow_urls: bool = False) -> list[Item]:
    """The prompts of a folder: `prompts.jsonl`, each line {"prompt": "...", "images": ["a.png", ...]}.

    `<image>` marks in the prompt are the places of the images; without marks, images come first. File names are
    relative to the folder.

    Raises:
        InputError: the file is missing or empty, or a line is wrong; the message has its number.
    """

    def item(number: int, line: PromptLine) -> Item:
        images = tuple(read_images(line.images, folder=folder, allow_urls=allow_urls))
        return Item("prompts", number, 0, images, (Turn(line.prompt, (), max_new_tokens=max_new_tokens),))

    return read_lines(folder / "prompts.jsonl", PromptLine, item, '{"prompt": "...", "images": ["a.png"]}')


def tune(
    bench: Bench,
    prompts: Sequence[Item],
    methods: Sequence[str],
    *,
    budgets: Sequence[float | int | str] = BUDGETS,
    options: dict[str, dict[str, Any]] | None = None,
    max_loss: float = 0.01,
    level: float = 0.95,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Tuned]:
    """Runs every method at every budget on every prompt.

    A budget holds if the upper bound of the mean loss is at most `max_loss`. The bound is the larger of the bootstrap
    bound over prompts at `level` and -ln((1 - level) / 2) / tokens, the largest rate that is consistent with zero
    events in that many tokens (the rule of three, assuming independent tokens). Prompts that a method does not apply
    to, because it drops only visual tokens, are left out.
    The loss of a prompt is the share of the full cache's reply tokens that the method does not reproduce, each
    predicted from the full cache's tokens before it. The first token of a reply is excluded, because its prefill
    attends to everything (it is included for methods that prune tokens during the prefill).

    Args:
        bench: runs methods on prompts.
        prompts: see `read_prompts`.
        methods: names of methods.
        budgets: all of one kind (shares, tokens or bytes).
        options: further settings per method name.
        max_loss: largest loss that is allowed, between 0 and 1.
        level: confidence of the bound.
        seed: of the bootstrap.
        progress: called with (prompts done, prompts).

    Raises:
        MethodError: a method takes no budget. InputError: max_loss is not a share; budgets of several kinds.
    """
    options = options or {}
    chosen = candidates_to_tune(methods, budgets, options, max_loss)
    results: dict[str, list[Result]] = {candidate.label: [] for candidate in chosen}
    for number, item in enumerate(prompts):
        if progress is not None:
            progress(number, len(prompts))
        for result in bench.run(item, chosen):
            results[result.label].append(result)
    found = []
    for name in dict.fromkeys(methods):
        own = [candidate for candidate in chosen if candidate.method.name == name]
        tried = tuple(_tried(candidate.method, results[candidate.label], level, seed) for candidate in own)
        found.append(Tuned(name, dict(options.get(name, {})), tried, max_loss))
    return found


def candidates_to_tune(
    methods: Sequence[str],
    budgets: Sequence[float | int | str],
    options: dict[str, dict[str, Any]],
    max_loss: float,
) -> list[Candidate]:
    """Every method at every budget, the largest budget first. Needs no model, so it can be called before loading one.

    Raises:
        MethodError: a method takes no budget. InputError: max_loss is not a share; budgets of several kinds.
    """
    if not 0 < max_loss < 1:
        raise InputError(
            f"max_loss is a share of tokens between 0 and 1; got {max_loss} (no number of prompts proves a loss of 0)"
        )
    if not budgets or not methods:
        raise InputError("nothing to tune; give at least one method and one budget")
    parsed = {budget: parse_budget(budget) for budget in budgets}
    if len({one.kind for one in parsed.values()}) != 1:
        raise InputError("budgets to tune must be of one kind: all shares, all tokens, or all bytes")
    order = sorted(parsed, key=lambda budget: parsed[budget].value, reverse=True)
    chosen = candidates(methods, order, options)
    for candidate in chosen:
        if getattr(candidate.method, "budget", None) not in order:
            raise MethodError(
                f"{candidate.label}: takes no budget, or its settings fix one, so there is nothing to tune"
            )
    return chosen


def _tried(method: Any, results: Sequence[Result], level: float, seed: int) -> Tried:
    good = [result for result in results if result.error is None]
    counted = [result for result in good if result.equal is not None and result.scored]
    loss = interval([1 - (result.equal or 0) for result in counted], level=level, seed=seed)
    scored = sum(result.scored for result in counted)
    unseen = -math.log((1 - level) / 2) / max(scored, 1)
    errors = tuple(result.error for result in results if result.error is not None)
    return Tried(
        method.budget,
        loss,
        max(loss.high, min(unseen, 1.0)) if loss.known else math.nan,
        _share([(result.stored_bytes, result.full_bytes) for result in good]),
        _share([(result.host_bytes, result.full_bytes) for result in good]),
        scored,
        tuple(error for error in errors if not does_not_apply(error)),
        sum(map(does_not_apply, errors)),
    )


def _share(pairs: Sequence[tuple[int | None, int | None]]) -> float:
    """Mean of own / full over prompts; NaN without any."""
    shares = [own / full for own, full in pairs if own is not None and full]
    return sum(shares) / len(shares) if shares else math.nan
