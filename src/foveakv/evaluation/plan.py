"""What is to be run: tasks, items, methods with their settings, the model. And what of it is still missing."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveakv.errors import InputError, MethodError

if TYPE_CHECKING:
    from foveakv.evaluation.compare import Candidate

FORMAT = 1
"""Of plan.json; a file with another number was made by another version."""

Key = tuple[str, int, int, str]
"""What `Result.key` is: task, item, seed, label."""


@dataclass(frozen=True)
class Entry:
    """A candidate as plain values: its label, the method's name, and all the method's settings, defaults as well.

    version: of the files that it depends on: the one that a method of one's own comes from, see
    `foveakv.methods.plugins`, and those that its settings name. None: there are none.
    """

    label: str
    method: str
    settings: dict[str, Any]
    version: str | None = None

    @classmethod
    def of(cls, candidate: Candidate) -> Entry:
        """InputError: a setting is neither a number, a text nor a path, so that the method could not be made again."""
        from foveakv.methods.plugins import version_of

        names = {f.name for f in fields(candidate.method) if f.init}
        for name in names:
            value = getattr(candidate.method, name)
            if not isinstance(value, int | float | str | PathLike | None):
                raise InputError(
                    f"{candidate.label}: a run writes settings down as numbers and texts, and {name} is of type "
                    f"{type(value).__name__}; where the method takes a file in its place, give that"
                )
        settings = {key: value for key, value in candidate.method.describe().items() if key in names}
        versions = [version_of(type(candidate.method)), *map(_digest, settings.values())]
        known = [version for version in versions if version is not None]
        return cls(candidate.label, candidate.method.name, settings, " ".join(known) or None)

    def candidate(self) -> Candidate:
        """The method again. MethodError: this version has no such method or setting."""
        from foveakv.evaluation.compare import Candidate
        from foveakv.methods import get

        return Candidate(self.label, get(self.method, **self.settings))


@dataclass(frozen=True)
class Unit:
    """One item of one task, with the labels of the candidates that are still missing. What a worker gets at a time."""

    task: str
    number: int
    seed: int
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A run. items: how many of each task. seed: of the items. dtype, device: None means as the model is loaded.

    plugins: files that register methods, see `foveakv.methods.plugins`.
    """

    tasks: tuple[str, ...]
    entries: tuple[Entry, ...]
    items: int
    seed: int = 0
    model: str = "demo"
    dtype: str | None = None
    device: str | None = None
    trust_remote_code: bool = False
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.items < 1 or self.seed < 0:
            raise InputError(f"a run has at least one item ({self.items}) and a seed of 0 or more ({self.seed})")
        if not self.tasks or not self.entries:
            raise InputError("a run has at least one task and one method")
        for names, what in ((self.tasks, "task"), ([entry.label for entry in self.entries], "label")):
            twice = sorted({name for name in names if list(names).count(name) > 1})
            if twice:
                raise InputError(f"the {what} {twice[0]!r} is there twice; every {what} is there once in a run")

    @classmethod
    def of(cls, tasks: Sequence[str], candidates: Sequence[Candidate], items: int, **options: Any) -> Plan:
        """From candidates as `foveakv.evaluation.compare.candidates` makes them."""
        return cls(tuple(tasks), tuple(map(Entry.of, candidates)), items, **options)

    def entry(self, label: str) -> Entry:
        return next(entry for entry in self.entries if entry.label == label)

    def keys(self) -> Iterator[Key]:
        """All results of the run, in the order in which they are made."""
        for unit in self.units():
            for label in unit.labels:
                yield unit.task, unit.number, unit.seed, label

    def units(self, done: Collection[Key] = ()) -> list[Unit]:
        """What is to be done, items outermost: a run that is stopped has all methods and tasks on the same items."""
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
        """Back from `to_dict`. InputError: another version's, or no plan at all."""
        if data.get("format") != FORMAT:
            raise InputError(f"this plan has format {data.get('format')!r}; this version of foveakv reads {FORMAT}")
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        values["tasks"] = tuple(data["tasks"])
        values["plugins"] = tuple(data.get("plugins", ()))
        values["entries"] = tuple(Entry(**entry) for entry in data["entries"])
        return cls(**values)

    def holding(self, done: Collection[Key]) -> Plan:
        """The part of this plan that these results are of."""
        return replace(
            self,
            tasks=tuple(task for task in self.tasks if any(key[0] == task for key in done)) or self.tasks,
            entries=tuple(entry for entry in self.entries if any(key[3] == entry.label for key in done))
            or self.entries,
            items=max((key[1] + 1 for key in done), default=1),
        )

    def conflicts(self, older: Plan) -> list[str]:
        """Why results of an older plan cannot stay with this one, in words. Empty: this plan only adds to it."""
        found = [
            f"{name} was {old!r} and is now {new!r}"
            for name in ("model", "seed", "dtype", "device", "trust_remote_code")
            if (old := getattr(older, name)) != (new := getattr(self, name))
        ]
        if self.items < older.items:
            found.append(f"items were {older.items} and are now {self.items}")
        missing = [task for task in older.tasks if task not in self.tasks]
        if missing:
            found.append(f"tasks that are missing now: {', '.join(missing)}")
        mine = {entry.label: entry for entry in self.entries}
        missing = [entry.label for entry in older.entries if entry.label not in mine]
        if missing:
            found.append(f"methods that are missing now: {', '.join(missing)}")
        for entry in older.entries:
            if entry.label in mine:
                found += _changes(entry, mine[entry.label])
        return found


def _digest(setting: Any) -> str | None:
    """Of the contents of the file that a setting names; None where it names none."""
    if not isinstance(setting, str | PathLike) or not Path(setting).suffix or not Path(setting).is_file():
        return None
    return hashlib.sha256(Path(setting).read_bytes()).hexdigest()[:16]


def _changes(old: Entry, new: Entry) -> list[str]:
    if old.method != new.method:
        return [f"{old.label!r} was {old.method} and is now {new.method}"]
    if old.version not in (None, new.version):
        return [f"{old.label!r} depends on a file that has changed: its own, or one that its settings name"]
    names = list(dict.fromkeys([*old.settings, *new.settings]))
    return [
        f"{old.label!r} had {name}={old.settings.get(name)!r} and now has {new.settings.get(name)!r}"
        for name in names
        if old.settings.get(name) != new.settings.get(name)
    ]


def with_baselines(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The full cache first, then the candidates, then random tokens at every budget that a candidate has.

    Random candidates that are there already stay, and those that are added have the settings of the first of them.
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
        raise MethodError("the label full belongs to the full cache, which everything is compared with")
    for each in candidates:
        if each.method.name != "random" and each.label.split(" ")[0] == "random":
            raise MethodError(f"the label {each.label!r} belongs to random tokens, the floor; choose another")
    return [*full, *(each for each in candidates if each.label != "full"), *added]
