"""What all forms of `foveakv tune` share: the prompts, the model, options of methods, and the output file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveakv.cli import common
from foveakv.errors import InputError

if TYPE_CHECKING:
    from foveakv.evaluation.items import Item


@dataclass(frozen=True)
class Request:
    """The command line. tasks, items: names of evaluation tasks, and the number of items of each (None: not given)."""

    model: str
    data: Path | None
    allow_urls: bool
    tasks: list[str] | None
    items: int | None
    max_new_tokens: int
    options: dict[str, dict[str, Any]]
    seed: int
    json: Path | None
    loading: dict[str, Any] = field(default_factory=dict)

    def prompts(self, *, builtin: bool = False) -> list[Item]:
        """The prompts of the folder or the items of the tasks; else, with `builtin`, those that come with the package.

        Raises:
            InputError: there are none, or a file is wrong.
        """
        from foveakv.evaluation import builtin_prompts
        from foveakv.evaluation.tune import read_prompts
        from foveakv.models import DEMO

        if self.data is not None and self.tasks:
            raise InputError("give prompts by --data or by --tasks, not both")
        if self.data is not None:
            return read_prompts(self.data, self.max_new_tokens, allow_urls=self.allow_urls)
        if self.tasks:
            return builtin_prompts.of_tasks(self.tasks, self.items or builtin_prompts.ITEMS, self.seed)
        if not builtin:
            raise InputError("--data is missing: a folder with prompts.jsonl, one prompt per line")
        if self.model == DEMO:
            return builtin_prompts.embedded(self.items or builtin_prompts.ITEMS, self.seed)
        return builtin_prompts.general(max_new_tokens=self.max_new_tokens)

    def load(self) -> Any:
        """Load model and processor."""
        return common.load_model(self.model, **self.loading)
