"""What a task is: items with images, turns with questions, and the facts that an answer must contain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


@dataclass(frozen=True)
class Turn:
    """A question and what its answer must contain.

    text: what the user says; in the first turn with one `<image>` mark per image. facts: the parts of the right answer;
    the score of a reply is the share of them that it gets right. separator: the text between the parts of a reply.
    ordered: a fact must be at its own place (a list), else it may be anywhere. If a reply has more parts than there are
    facts, the first ones count. uncounted: number of leading facts that do not count, because the first token of the
    reply decides them, and the prefill that predicts it attends to everything; only with `ordered`. max_new_tokens: the
    longest reply.
    """

    text: str
    facts: tuple[str, ...]
    separator: str = "; "
    ordered: bool = False
    uncounted: int = 0
    max_new_tokens: int = 16

    @property
    def answer(self) -> str:
        """The right reply."""
        return self.separator.join(self.facts)

    @property
    def counted(self) -> int:
        """The number of facts that count."""
        return len(self.facts) - self.uncounted


@dataclass(frozen=True)
class Item:
    """One question, or several about the same images. Equal `number` and `seed` give the same item.

    long: the reply has a hundred tokens or more, and is also scored by the full cache's log-likelihood.
    """

    task: str
    number: int
    seed: int
    images: tuple[Image, ...]
    turns: tuple[Turn, ...]
    long: bool = False


@dataclass(frozen=True)
class Task:
    """A kind of item. `make(rng)` returns images and turns; equal seeds give equal items.

    title: a one-line description for reports. long: see `Item`. ranked: the task ranks methods; if False it is a
    control that is only reported. group: the kind of answer, see `foveakv.evaluation.tasks.GROUPS`; reports show a mean
    of every group. None: no group.
    """

    name: str
    title: str
    make: Callable[[np.random.Generator], tuple[tuple[Image, ...], tuple[Turn, ...]]]
    long: bool = False
    ranked: bool = True
    group: str | None = None

    def item(self, number: int, seed: int = 0) -> Item:
        """The task's item `number` (from 0)."""
        import numpy as np

        digits = [seed, number, *self.name.encode("utf8")]
        images, turns = self.make(np.random.default_rng(digits))
        return Item(self.name, number, seed, images, turns, self.long)
