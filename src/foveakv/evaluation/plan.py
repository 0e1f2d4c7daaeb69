"""The plan of a run: tasks, items, methods with their settings, the model; and which results are still missing."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from foveakv.errors import InputError, MethodError
from foveakv.evaluation import schema
from foveakv.evaluation.schema import Between, Count

if TYPE_CHECKING:
    from foveakv.evaluation.compare import Candidate

FORMAT = 2
"""Format number of plan.json; a file with another number was written by another version."""
_OLDER = {1: "its scores count the first item of a list, which the full prefill predicts; run it again in a new folder"}

Key = tuple[str, int, int, str]
"""`Result.key`: task, item, seed, label."""


@dataclass(frozen=True)
class Entry:
    """A candidate as plain values: its label, the name of the method, and all its settings including defaults.

    version: digests of the files that it depends on: the file of a plugin method (see `foveakv.methods.plugins`) and
    files that its settings name. None: there are none.
    """

    label: str
    method: str
    settings: dict[str, Any]
    version: str | None = None

    @classmethod
    def of(cls, candidate: Candidate) -> Entry:
        """The entry of a candidate.

        Raises:
            InputError: a setting is not a number, text or path, so that the method cannot be recreated from the plan.
        """
        from foveakv.methods.plugins import version_of

        names = {f.name for f in fields(candidate.method) if f.init}
        for name in names:
            value = getattr(candidate.method, name)
            if not isinstance(value, int | float | str | PathLike | None):
                raise InputError(
                    f"{candidate.label}: a plan stores settings as numbers and texts, and {name} is a "
                    f"{type(value).__name__}; if the method accepts a file instead, pass its path"
                )
        settings = {key: value for key, value in candidate.method.describe().items() if key in names}
        versions = [version_of(type(candidate.method)), *map(_digest, settings.values())]
        known = [version for version in versions if version is not None]
        return cls(candidate.label, candidate.method.name, settings, " ".join(known) or None)

    def candidate(self) -> Candidate:
        """Recreates the candidate. MethodError: this version has no such method or setting."""
        from foveakv.evaluation.compare import Candidate
        from foveakv.methods import get

        return Candidate(self.label, get(self.method, **self.settings))


@dataclass(frozen=True)
class Unit:
    """A unit of work: one item of one task, and the labels of the candidates whose results are missing."""

    task: str
    number: int
    seed: int
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A run.

    items: number of items of each task. seed: of the items. dtype, device: as for `foveakv.load`, None for its default.
    plugins: files that register methods, see `foveakv.methods.plugins`. time_every: the time per token is measured on
    every n-th item, 0 measures none.
    """

    tasks: tuple[str, ...]
    entries: tuple[Entry, ...]
    items: Annotated[int, Between(1, 10**9)]
    seed: Count = 0
    model: str = "demo"
    dtype: str | None = None
    device: str | None = None
    trust_remote_code: bool = False
    plugins: tuple[str, ...] = ()
    time_every: Count = 10

    def __post_init__(self) -> None:
        if self.items < 1 or self.seed < 0:
            raise InputError(f"a run needs at least one item and a seed of 0 or more, got {self.items} and {self.seed}")
        if not self.tasks or not self.entries:
            raise InputError("a run needs at least one task and one method")
        for names, what in ((self.tasks, "task"), ([entry.label for entry in self.entries], "label")):
            twice = sorted({name for name in names if list(names).count(name) > 1})
            if twice:
                raise InputError(f"duplicate {what} {twice[0]!r}; every {what} of a run must be unique")

    @classmethod
    def of(cls, tasks: Sequence[str], candidates: Sequence[Candidate], items: int, **options: Any) -> Plan:
        """A plan from candidates, see `foveakv.evaluation.compare.candidates`. `options`: the other fields."""
        return cls(tuple(tasks), tuple(map(Entry.of, candidates)), items, **options)

    def entry(self, label: str) -> Entry:
        """The entry with this label."""
        return next(entry for entry in self.entries if entry.label == label)

    def keys(self) -> Iterator[Key]:
        """The keys of all results of the run, in the order in which they are computed."""
        for unit in self.units():
            for label in unit.labels:
                yield unit.task, unit.number, unit.seed, label

    def units(self, done: Collection[Key] = ()) -> list[Unit]:
        """The units that are not done, item by item, so that a stopped run has the same items for all methods."""
        units = []
        for number in range(self.items):
            for task in self.tasks:
                labels = (entry.label for entry in self.entries)
                missing = tuple(label for label in labels if (task, number, self.seed, label) not in done)
                if missing:
                    units.append(Unit(task, number, self.seed, missing))
        return units

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`. InputError: another version's plan, or a missing, unknown or wrong field."""
        if data.get("format") != FORMAT:
            found = data.get("format")
            why = f" ({_OLDER[found]})" if isinstance(found, int) and found in _OLDER else ""
            raise InputError(f"the plan has format {found!r}; this version of foveakv reads {FORMAT}{why}")
        found = schema.read(cls, {name: value for name, value in data.items() if name != "format"})
        for place, entry in enumerate(found.entries):
            schema.check_budget(entry.settings.get("budget"), f"entries[{place}].settings.budget")
        return found

    def holding(self, done: Collection[Key]) -> Plan:
        """The part of this plan that has results."""
        return replace(
            self,
            tasks=tuple(task for task in self.tasks if any(key[0] == task for key in done)) or self.tasks,
            entries=tuple(entry for entry in self.entries if any(key[3] == entry.label for key in done))
            or self.entries,
            items=max((key[1] + 1 for key in done), default=1),
        )

    def conflicts(self, older: Plan) -> list[str]:
        """Why results of an older plan do not fit this one, as texts. Empty: this plan only adds to the older one."""
        found = [
            f"{name} was {old!r} and is now {new!r}"
            for name in ("model", "seed", "dtype", "device", "trust_remote_code")
            if (old := getattr(older, name)) != (new := getattr(self, name))
        ]
        if self.items < older.items:
            found.append(f"items were {older.items} and are now {self.items}")
        missing = [task for task in older.tasks if task not in self.tasks]
        if missing:
            found.append(f"missing tasks: {', '.join(missing)}")
        mine = {entry.label: entry for entry in self.entries}
        missing = [entry.label for entry in older.entries if entry.label not in mine]
        if missing:
            found.append(f"missing methods: {', '.join(missing)}")
        for entry in older.entries:
            if entry.label in mine:
                found += _changes(entry, mine[entry.label])
        return found


def _digest(setting: Any) -> str | None:
    """Digest of the file that a setting names; None if it does not name a file."""
    if not isinstance(setting, str | PathLike) or not Path(setting).suffix or not Path(setting).is_file():
        return None
    return hashlib.sha256(Path(setting).read_bytes()).hexdigest()[:16]


def _changes(old: Entry, new: Entry) -> list[str]:
    if old.method != new.method:
        return [f"{old.label!r} was {old.method} and is now {new.method}"]
    if old.version not in (None, new.version):
        return [f"{old.label!r} depends on a file that has changed (its own file, or one that its settings name)"]
    names = list(dict.fromkeys([*old.settings, *new.settings]))
    return [
        f"{old.label!r} had {name}={old.settings.get(name)!r} and now has {new.settings.get(name)!r}"
        for name in names
        if old.settings.get(name) != new.settings.get(name)
    ]


def with_baselines(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Adds the full cache as the first candidate, and random tokens at every budget that a candidate has.

    Existing random candidates are kept; added ones have the settings of the first of them.

    Raises:
        MethodError: another method has a label that belongs to the full cache or to random.
    """
    from foveakv.evaluation.compare import Candidate
    from foveakv.methods import get

    budgets = [getattr(each.method, "budget", None) for each in candidates]
    randoms = [each.method for each in candidates if each.method.name == "random"] or [get("random")]
    taken = {budget for budget, each in zip(budgets, candidates, strict=True) if each.method.name == "random"}
    added = [
        Candidate(f"random {budget}", replace(randoms[0], **{"budget": budget}))
        for budget in dict.fromkeys(budgets)
        if budget is not None and budget not in taken
    ]
    full = [each for each in candidates if each.label == "full"] or [Candidate("full", get("full"))]
    if full[0].method.name != "full":
        raise MethodError("the label full is reserved for the full cache, the baseline; choose another")
    for each in candidates:
        if each.method.name != "random" and each.label.split(" ")[0] == "random":
            raise MethodError(f"the label {each.label!r} is reserved for random tokens, the floor; choose another")
    return [*full, *(each for each in candidates if each.label != "full"), *added]
