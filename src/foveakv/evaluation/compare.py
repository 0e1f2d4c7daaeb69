"""Compare methods on one prompt: their answers and costs relative to the plain model's."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foveakv.core.columns import held_share
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.api import compress
from foveakv.engines.transformers.options import CacheOptions, resolve
from foveakv.engines.transformers.sizes import layer_nbytes
from foveakv.errors import FoveaKVError, InputError, MethodError
from foveakv.evaluation import environment
from foveakv.methods import Method, find, get
from foveakv.methods.full import Full
from foveakv.util.tables import Column, FittedTable
from foveakv.util.texts import one_line, size_text
from foveakv.util.timing import StepClock

if TYPE_CHECKING:
    from foveakv.core.prompt import PromptMap
    from foveakv.engines.transformers.cache import CompressedCache

BASELINE = "transformers"
"""Label of the baseline row: the plain model with transformers' own cache and attention."""


@dataclass(frozen=True)
class Candidate:
    """A method with its settings, and its label in tables."""

    label: str
    method: Method


@dataclass(frozen=True)
class Row:
    """One run of the prompt. Agreements are None in the baseline's row, and if `error` says why there is no answer.

    tokens: generated ids. prefix_agreement: share of leading tokens equal to the baseline's. equal_tokens: share of
    positions with the same token. stored_bytes: storage on the compute device at the end of the answer; full_bytes: a
    plain cache's for the same tokens; peak_bytes: the maximum of stored_bytes during the run; host_bytes: the backing
    store. evicted: evicted slots. retrieved: slots requested by retrieval. prefill_seconds, token_seconds: medians, for
    one forward pass. notes: caveats. report: `Report.to_dict()`, None in the baseline's row. kept: for every prompt
    column, the share of (layer, head) pairs that still hold it (None: not recorded).
    """

    label: str
    settings: dict[str, Any]
    text: str = ""
    tokens: tuple[int, ...] = ()
    prefix_agreement: float | None = None
    equal_tokens: float | None = None
    stored_bytes: int = 0
    full_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    evicted: int = 0
    retrieved: int = 0
    prefill_seconds: float = 0.0
    token_seconds: float | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None
    report: dict[str, Any] | None = field(default=None, repr=False)
    kept: tuple[float, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Comparison:
    """The rows, baseline first, and what is needed to reproduce them.

    max_new_tokens, repeats, kv_dtype: as given to `compare`. prompt_tokens: length of the prompt; visual_tokens: image
    and video tokens among them. environment: versions and hardware. prompt: the map of the prompt's columns, None if
    every method failed.
    """

    rows: tuple[Row, ...]
    max_new_tokens: int
    repeats: int
    prompt_tokens: int
    visual_tokens: int
    environment: dict[str, Any]
    prompt: PromptMap | None = field(default=None, repr=False)
    kv_dtype: str | None = None

    @property
    def baseline(self) -> Row:
        """The row of the plain model."""
        return self.rows[0]

    @property
    def notes(self) -> list[str]:
        """Notes that limit these figures."""
        found = [f"{row.label}: {note}" for row in self.rows for note in row.notes]
        answer = len(self.baseline.tokens)
        if answer <= 2:
            tokens = "1 token" if answer == 1 else f"{answer} tokens"
            found.append(
                f"the answer has {tokens}, and the first attends to the whole prompt: agreement is not informative"
            )
        return found

    @property
    def failures(self) -> list[Row]:
        """The rows with an error."""
        return [row for row in self.rows if row.error is not None]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the kept shares are left out."""
        rows = [{f.name: getattr(row, f.name) for f in fields(row) if f.name != "kept"} for row in self.rows]
        return {
            "max_new_tokens": self.max_new_tokens,
            "repeats": self.repeats,
            "kv_dtype": self.kv_dtype,
            "prompt_tokens": self.prompt_tokens,
            "visual_tokens": self.visual_tokens,
            "notes": self.notes,
            "environment": self.environment,
            "rows": [{**row, "tokens": list(row["tokens"]), "notes": list(row["notes"])} for row in rows],
        }

    def table(self) -> FittedTable:
        """One line per row, as a rich renderable."""
        return _table(self)


def candidates(
    names: Sequence[str],
    budgets: Sequence[float | int | str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Candidate]:
    """Every named method at every budget; a method without a `budget` field occurs once.

    Args:
        names: names of methods, in the order of the rows.
        budgets: as for `foveakv.core.budget.parse_budget`; if empty, each method's default.
        options: further settings per method name.
    """
    options = {name: dict(settings) for name, settings in (options or {}).items()}
    for name in options:
        if name not in names:
            raise MethodError(f"there are settings for {name!r}, which is not one of the methods: {', '.join(names)}")
    made: list[Candidate] = []
    for name in names:
        takes_budget = "budget" in {f.name for f in fields(find(name))}
        own = options.get(name, {})
        for budget in budgets if takes_budget and budgets and "budget" not in own else [None]:
            settings = own if budget is None else {**own, "budget": budget}
            label = name if budget is None else f"{name} {budget}"
            made.append(Candidate(label, get(name, **settings)))
    if not made:
        raise MethodError("no method to compare; name at least one")
    return made


def compare(
    model: Any,
    inputs: Mapping[str, Any],
    methods: Sequence[Candidate | Method],
    *,
    max_new_tokens: int = 32,
    repeats: int = 1,
    ignore_eos: bool = False,
    decode: Callable[[Sequence[int]], str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Comparison:
    """Runs one prompt with transformers' own cache and with every method, with greedy decoding.

    Args:
        model: a model that `foveakv.compress` takes.
        inputs: the inputs of `generate` for one sequence, e.g. from `foveakv.models.inputs.build_inputs`.
        methods: candidates or methods; the baseline is added.
        max_new_tokens: the longest answer.
        repeats: runs per row, alternating between rows; times are medians.
        ignore_eos: always generate `max_new_tokens` tokens, so that all rows decode equally many.
        decode: ids -> text of an answer.
        progress: called with (label, runs done, total runs) before every run.
        options: fields of `foveakv.CacheOptions`, for the caches of all methods.

    A method that raises one of FoveaKV's errors gets a row with that error; the others continue.

    Raises:
        InputError: more than one prompt, or a number that is too small.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1:
        raise InputError("compare takes one prompt: input_ids of shape [1, tokens]")
    if repeats < 1 or max_new_tokens < 1:
        raise InputError(f"repeats ({repeats}) and max_new_tokens ({max_new_tokens}) must be at least 1")
    chosen = [item if isinstance(item, Candidate) else Candidate(item.name, item) for item in methods]
    limits = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
    if ignore_eos:
        limits["min_new_tokens"] = max_new_tokens
    cache_options = resolve(None, options)
    run = _Runner(model, inputs, limits, decode or (lambda tokens: ""), cache_options)
    report = progress or (lambda label, done, total: None)
    total = repeats * (len(chosen) + 1)
    report("warm-up", 0, total)
    run.warm_up()
    runs: list[list[Row]] = [[] for _ in range(len(chosen) + 1)]
    done = 0
    for _ in range(repeats):  # alternating, so that other load on the machine affects all rows
        for place, candidate in enumerate([None, *chosen]):
            report(candidate.label if candidate else BASELINE, done, total)
            done += 1
            if not runs[place] or runs[place][-1].error is None:
                runs[place].append(run.once(candidate))
    baseline = _median_row(runs[0])
    rows = [baseline]
    for row in map(_median_row, runs[1:]):
        if row.error is None:
            prefix, equal = agreement(baseline.tokens, row.tokens)
            row = replace(row, prefix_agreement=prefix, equal_tokens=equal)
        rows.append(row)
    prompt = run.prompt
    return Comparison(
        rows=tuple(rows),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        prompt_tokens=int(ids.shape[1]),
        visual_tokens=0 if prompt is None else int(prompt.visual.sum()),
        environment=environment.describe(model),
        prompt=prompt,
        kv_dtype=cache_options.kv_dtype,
    )


def agreement(reference: Sequence[int], answer: Sequence[int]) -> tuple[float, float]:
    """(share of leading tokens that are equal, share of positions that are equal), of the longer answer."""
    length = max(len(reference), len(answer))
    if length == 0:
        return 1.0, 1.0
    same = [a == b for a, b in zip(reference, answer, strict=False)]
    prefix = same.index(False) if False in same else len(same)
    return prefix / length, sum(same) / length


def kept_share(cache: CompressedCache, sequence: int = 0) -> Tensor:
    """[C] float: for every prompt column, the share of (layer, KV head) pairs that currently store it."""
    held = (cache.kept(layer.layer_idx)[sequence].cpu() for layer in cache.compressed)
    return held_share(held, cache.prompt_columns)[0]


def storage_nbytes(cache: Any) -> int:
    """Bytes of a transformers cache's tensors, each storage counted once."""
    return sum(layer_nbytes(layer) for layer in cache.layers)


class _Runner:
    """Runs the prompt once, with or without a method, and measures it."""

    def __init__(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        limits: dict[str, Any],
        decode: Callable[[Sequence[int]], str],
        options: CacheOptions,
    ) -> None:
        self.model, self.inputs, self.limits = model, dict(inputs), limits
        self.decode, self.options = decode, options
        self.columns = self.inputs["input_ids"].shape[1]
        self.prompt: PromptMap | None = None

    def warm_up(self) -> None:
        """Generates two tokens on both paths, so that no row includes one-time work."""
        short = {"max_new_tokens": 2, "do_sample": False, "num_beams": 1}
        self.model.generate(**self.inputs, **short)
        with compress(self.model, Full(), options=self.options):
            self.model.generate(**self.inputs, **short)

    def once(self, candidate: Candidate | None) -> Row:
        """One run of a candidate, or of the baseline for None."""
        if candidate is None:
            return self.plain()
        try:
            return self.compressed(candidate)
        except FoveaKVError as error:
            settings = candidate.method.describe()
            return Row(candidate.label, settings, error=f"{type(error).__name__}: {error}")

    def plain(self) -> Row:
        cache = compat.DynamicCache(config=compat.text_config_of(self.model))
        tokens, clock = self._generate(**{compat.cache_argument(self.model): cache})
        stored = storage_nbytes(cache)
        return Row(
            label=BASELINE,
            settings={"method": BASELINE},
            text=self.decode(tokens),
            tokens=tokens,
            stored_bytes=stored,
            full_bytes=stored,
            peak_bytes=stored,
            prefill_seconds=clock.prefill_seconds,
            token_seconds=clock.token_seconds,
        )

    def compressed(self, candidate: Candidate) -> Row:
        with compress(self.model, candidate.method, options=self.options) as session:
            tokens, clock = self._generate()
            report = session.report
            self.prompt = session.cache.full_prompt.to("cpu")
            return Row(
                label=candidate.label,
                settings=report.settings,
                text=self.decode(tokens),
                tokens=tokens,
                stored_bytes=report.stored_bytes,
                full_bytes=report.full_bytes,
                peak_bytes=report.peak_bytes,
                host_bytes=report.host_bytes,
                evicted=report.evicted,
                retrieved=report.retrieved,
                prefill_seconds=clock.prefill_seconds,
                token_seconds=clock.token_seconds,
                notes=tuple(report.notes),
                report=report.to_dict(),
                kept=tuple(kept_share(session.cache).tolist()),
            )

    def _generate(self, **extra: Any) -> tuple[tuple[int, ...], StepClock]:
        with StepClock(self.model) as clock:
            sequences = self.model.generate(**self.inputs, **self.limits, **extra)
        return tuple(sequences[0, self.columns :].tolist()), clock


def _median_row(rows: Sequence[Row]) -> Row:
    """The row of the last run, with the median times of all runs."""
    per_token = [row.token_seconds for row in rows if row.token_seconds is not None]
    return replace(
        rows[-1],
        prefill_seconds=median(row.prefill_seconds for row in rows),
        token_seconds=median(per_token) if per_token else None,
    )


def _table(result: Comparison) -> FittedTable:
    from rich.text import Text

    base = result.baseline
    figures = ("same", "stored", "prefill", "per token")
    table = FittedTable(
        [Column("method", right=False), Column("answer", text=True, widest=32, right=False), *map(Column, figures)],
        title=f"{result.prompt_tokens:,} prompt tokens, {result.visual_tokens:,} of them visual; "
        f"up to {result.max_new_tokens} new tokens" + (f"; slots in {result.kv_dtype}" if result.kv_dtype else ""),
        caption="same: leading tokens as transformers'; percent: of full bytes, of transformers' times",
    )
    for row in result.rows:
        label = row.label + (" *" if row.notes else "")
        if row.error is not None:
            table.add(label, Text("failed", style="red"), "", "", "", "")
            continue
        stored = f"{size_text(row.stored_bytes)} {_ratio(row.stored_bytes, row.full_bytes)}"
        if row.host_bytes:
            stored += f"\n+ {size_text(row.host_bytes)} host"
        table.add(
            label,
            textwrap.shorten(one_line(row.text), 64, placeholder=" ..."),
            "" if row.prefix_agreement is None else f"{row.prefix_agreement:.0%}",
            stored,
            f"{row.prefill_seconds:.2f} s {_ratio(row.prefill_seconds, base.prefill_seconds)}",
            "-"
            if row.token_seconds is None
            else f"{_milliseconds(row.token_seconds)} {_ratio(row.token_seconds, base.token_seconds)}",
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def _ratio(value: float, reference: float | None) -> str:
    return f"{value / reference:4.0%}" if reference else ""
