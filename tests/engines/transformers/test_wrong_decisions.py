"""Wrong decisions of methods that users write: one error that names the method, and a model that works afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import families
import matrix
import pytest
import torch
from torch import Tensor

import foveakv
from foveakv.core.columns import from_end
from foveakv.errors import MethodError
from foveakv.methods import (
    Decision,
    DecodeView,
    Evict,
    Field,
    Method,
    Observes,
    Offload,
    PrefillView,
    PromptEndView,
    ReadView,
)

FAMILY = "llava"
ALL = ("prefill", "after_prefill", "decode", "read")


@dataclass
class Own(Method):
    """Does what a test asks for."""

    on_prefill: Callable[[PrefillView], Any] = lambda view: None
    on_end: Callable[[PromptEndView], Any] = lambda view: None
    on_step: Callable[[DecodeView], Any] | None = None
    on_read: Callable[[ReadView], Any] | None = None
    acts: tuple[Any, ...] | None = None
    replaces: bool = True
    prunes: int | None = None
    calls: list[str] = field(default_factory=list)

    name: ClassVar[str] = "own"

    @property
    def decides(self) -> tuple[Any, ...]:
        if self.acts is not None:
            return self.acts
        return "prefill", "after_prefill", "read" if self.on_step is None else "decode"

    @property
    def observes(self) -> Observes:
        return Observes(steps=True)

    @property
    def merges(self) -> bool:
        return self.replaces

    @property
    def prunes_after(self) -> int | None:
        return self.prunes

    def prefill(self, view: PrefillView) -> Any:
        self.calls.append("prefill")
        return self.on_prefill(view)

    def after_prefill(self, view: PromptEndView) -> Any:
        self.calls.append("after_prefill")
        return self.on_end(view)

    def decode(self, view: DecodeView) -> Any:
        self.calls.append("decode")
        return None if self.on_step is None else self.on_step(view)

    def read(self, view: ReadView) -> Any:
        return super().read(view) if self.on_read is None else self.on_read(view)


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    """Two sequences, one of them padded."""
    return families.encode(FAMILY, [families.row(FAMILY, 1), families.row(FAMILY, 2)])


@pytest.fixture(scope="module")
def expected(inputs: dict[str, Tensor]) -> Tensor:
    return matrix.plain(matrix.model(FAMILY), inputs).tokens


def fails(method: Own, inputs: dict[str, Tensor], expected: Tensor, message: str, **options: Any) -> None:
    """The error names the method; the same object model then answers as before, plain and compressed."""
    model = matrix.model(FAMILY)
    with foveakv.compress(model, method, **options), pytest.raises(MethodError, match=f"^own: .*{message}"):
        model.generate(**inputs, **matrix.GREEDY)
    assert torch.equal(matrix.plain(model, inputs).tokens, expected)
    assert torch.equal(matrix.compressed(model, matrix.method("full"), inputs).tokens, expected)
    # with a cache of one's own: that one is of no use any more, and a new one is
    cache = foveakv.cache_for(model, method, **options)
    with pytest.raises(MethodError, match=r"^own: "):
        model.generate(**inputs, **matrix.GREEDY, past_key_values=cache)
    again = model.generate(**inputs, **matrix.GREEDY, past_key_values=foveakv.cache_for(model, matrix.method("full")))
    assert torch.equal(again.sequences, expected)


def shape(view: PrefillView) -> tuple[int, int, int]:
    batch, heads, columns = view.keys.shape[:3]
    return batch, heads, columns


def keep(view: PrefillView) -> Tensor:
    return torch.ones(shape(view), dtype=torch.bool)


def offload(view: PrefillView, **changed: Any) -> Offload:
    return Offload(**{"heads": torch.ones(shape(view)[:2], dtype=torch.bool), "chunk": 4, **changed})


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (lambda view: keep(view), "`prefill` must return a Decision or None, got Tensor"),
        (lambda view: True, "`prefill` must return a Decision or None, got bool"),
        (lambda view: Decision(keep=keep(view).float()), r"keep must be bool .*, got float32"),
        (lambda view: Decision(keep=keep(view).long()), r"keep must be bool .*, got int64"),
        (lambda view: Decision(keep=keep(view)[..., 1:]), r"keep must be bool \[2, 2 or 1, "),
        (lambda view: Decision(keep=keep(view)[:, 0]), r"keep must be bool \[2, 2 or 1, "),
        (lambda view: Decision(keep=keep(view)[:1]), r"keep must be bool \[2, 2 or 1, "),
        (lambda view: Decision(keep=keep(view).repeat(1, 2, 1)), r"keep must be bool \[2, 2 or 1, "),
        (lambda view: Decision(keep=keep(view).tolist()), "keep must be bool .*, got list"),
        (lambda view: Decision(keys=view.keys[..., 1:]), "replaced keys must be float32"),
        (lambda view: Decision(keys=view.keys[:, :, 1:]), "replaced keys must be float32"),
        (lambda view: Decision(keys=view.keys.double()), "replaced keys must be float32 .*, got float64"),
        (lambda view: Decision(values=view.values.half()), "replaced values must be float32 .*, got float16"),
        (lambda view: Decision(values=view.values[:1]), "replaced values must be float32"),
        (lambda view: Decision(evict=Evict(0, [1, 1])), "`prefill` cannot decide about evict; return a mask in `keep`"),
        (lambda view: Decision(fields={"a": Field(torch.zeros(2, 2))}), r"fields\['a'\] must have values \[2, 2, "),
        (lambda view: Decision(fields={"a": Field(keep(view)[:, :1])}), r"fields\['a'\] must have values \[2, 2, "),
        (lambda view: Decision(fields={"a": torch.zeros(shape(view))}), r"fields\['a'\] must be a Field, got float32"),
        (lambda view: Decision(fields={"residual": Field()}), "'residual' is reserved"),
        (lambda view: Decision(earlier=[Decision()]), "`earlier` must be a list of 0 decisions, .*; got 1 decisions"),
        (lambda view: Decision(earlier=Decision()), "`earlier` must be a list of 0 decisions, .*; got Decision"),
        (
            lambda view: Decision(earlier=[None] * view.compressed_idx) if view.compressed_idx == 2 else None,
            "`earlier` must hold a Decision per layer, got NoneType",
        ),
        (
            lambda view: (
                Decision(earlier=[Decision(keep=keep(view)[..., 1:])] * 3) if view.compressed_idx == 3 else None
            ),
            r"keep must be bool \[2, 2 or 1, ",
        ),
        (
            lambda view: (
                Decision(earlier=[Decision(chunks=torch.ones(2, 2).long())]) if view.compressed_idx == 1 else None
            ),
            "`earlier` cannot decide about chunks; it has `keep` only",
        ),
        (lambda view: Decision(stream=torch.ones(2, 3, dtype=torch.bool)), r"stream must be bool \[2, "),
        (lambda view: Decision(stream=torch.ones(2, shape(view)[2])), r"stream must be bool .*, got float32"),
        (lambda view: Decision(offload=offload(view, heads=torch.ones(2, 2))), r"Offload.heads must be bool \[2, 2\]"),
        (
            lambda view: Decision(offload=offload(view, heads=torch.ones(2, 4, dtype=torch.bool))),
            r"Offload.heads must be bool \[2, 2\]",
        ),
        (lambda view: Decision(offload=offload(view, chunk=0)), "Offload.chunk must be a whole number, at least 1"),
        (lambda view: Decision(offload=offload(view, chunk=2.5)), "Offload.chunk must be .*; got 2.5"),
        (lambda view: Decision(offload=offload(view, place="cloud")), "place must be one of host, device, disk; got"),
        (lambda view: Decision(offload=offload(view, summary="max")), "summary must be one of mean, bounds; got 'max'"),
        (lambda view: Decision(offload=offload(view, digest_dtype="int4")), "digest_dtype must be one of model, "),
        (lambda view: Decision(offload=torch.ones(2, 2, dtype=torch.bool)), "offload must be an Offload"),
        (
            lambda view: Decision(offload=offload(view), chunks=torch.ones(2, 1, dtype=torch.int64)),
            r"chunks must be int64 \[2, 2\], got int64 \[2, 1\]",
        ),
        (lambda view: Decision(offload=offload(view), chunks=torch.ones(2, 2)), r"chunks must be .*, got float32"),
        (lambda view: Decision(offload=offload(view), chunks=3), "chunks must be int64 .*, got int 3"),
    ],
)
def test_prefill(decision: Any, message: str, inputs: dict[str, Tensor], expected: Tensor) -> None:
    method = Own(on_prefill=decision, prunes=0)
    fails(method, inputs, expected, message)
    assert method.calls[0] == "prefill"
    assert "decode" not in method.calls


def test_a_stream_from_another_layer(inputs: dict[str, Tensor], expected: Tensor) -> None:
    def late(view: PrefillView) -> Decision | None:
        real = view.prompt.real
        return Decision(stream=real) if view.compressed_idx == 2 else None

    fails(Own(on_prefill=late, prunes=1), inputs, expected, "layer 2 prunes .*, and prunes_after declares layer 1")
    fails(Own(on_prefill=late), inputs, expected, "layer 2 prunes .*, and prunes_after declares no layer")


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        (lambda view: [Decision()] * 3, "after_prefill returned 3 decisions for 4 layers"),
        (lambda view: [Decision()] * 5, "after_prefill returned 5 decisions for 4 layers"),
        (lambda view: [], "after_prefill returned 0 decisions for 4 layers"),
        (lambda view: Decision(), "`after_prefill` must return one Decision per layer or None, got Decision"),
        (lambda view: [Decision(), view.request.prompt.real] * 2, "must return a Decision or None, got Tensor"),
        (lambda view: [Decision(keep=view.request.prompt.real)] * 4, r"keep must be bool \[2, 2 or 1, "),
        (lambda view: [Decision(keep=view.request.prompt.real[:, None].float())] * 4, "keep .*, got float32"),
        (lambda view: [Decision(stream=view.request.prompt.real)] * 4, "cannot decide about stream; `prefill` can"),
        (lambda view: [Decision(fields={"a": Field()})] * 4, "cannot decide about fields; `prefill` can"),
        (lambda view: [Decision(keys=torch.zeros(1))] * 4, "cannot decide about keys; `prefill` can"),
        (lambda view: [Decision(evict=Evict(0, [1, 1]))] * 4, "cannot decide about evict; return a mask"),
        (lambda view: [Decision(chunks=torch.ones(3, 2, dtype=torch.int64))] * 4, r"chunks must be int64 \[2, 2\]"),
        (
            lambda view: [Decision(offload=Offload(torch.ones(2, 3, dtype=torch.bool), 4))] * 4,
            r"Offload.heads must be bool \[2, 2\]",
        ),
    ],
)
def test_after_prefill(decisions: Any, message: str, inputs: dict[str, Tensor], expected: Tensor) -> None:
    fails(Own(on_end=decisions), inputs, expected, message)


def test_chunks_that_were_offloaded_or_evicted_before(inputs: dict[str, Tensor], expected: Tensor) -> None:
    every, none = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.int64)

    def ragged(view: PrefillView) -> Decision:
        kept = keep(view)
        kept[:, 1, 5:20] = False
        return Decision(keep=kept)

    def end(view: PromptEndView) -> list[Decision]:
        return [Decision(offload=Offload(every, 4), chunks=none) for _ in view.request.layers]

    twice = Own(on_prefill=lambda view: Decision(offload=offload(view)), on_end=end)
    fails(twice, inputs, expected, "whose chunks `prefill` has offloaded")
    fails(Own(on_prefill=ragged, on_end=end), inputs, expected, "only where all heads store the same tokens")


def slots(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).expand(2, 1, -1)


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (lambda view: view.slots.valid(), "`decode` must return a Decision or None, got Tensor"),
        (lambda view: Evict(0, [1, 1]), "`decode` must return a Decision or None, got Evict"),
        (lambda view: Decision(keep=view.slots.valid()[..., 1:]), r"keep must be bool \[2, 2 or 1, "),
        (lambda view: Decision(keep=view.slots.valid().int()), "keep must be bool .*, got int32"),
        (lambda view: Decision(keep=view.slots.valid(), evict=Evict(0, [1, 1])), "both `keep` and `evict`"),
        (lambda view: Decision(evict=slots(1)), "evict must be an Evict, got int64"),
        (lambda view: Decision(evict=Evict(10_000, [1, 1])), "names slot 10000, and "),
        (lambda view: Decision(evict=Evict(-1, [1, 1])), "names slot -1, and "),
        (lambda view: Decision(evict=Evict(1.0, [1, 1])), "names slot 1.0, and "),
        (lambda view: Decision(evict=Evict(slots(1, 10_000), [2, 2])), "not stored in their head"),
        (lambda view: Decision(evict=Evict(slots(-1), [1, 1])), "are not stored in their head"),
        (lambda view: Decision(evict=Evict(slots(1, dtype=torch.int32), [1, 1])), r"must be int64 \[2, 2 or 1, n\]"),
        (lambda view: Decision(evict=Evict(slots(1)[:, 0], [1, 1])), r"must be int64 \[2, 2 or 1, n\], got"),
        (lambda view: Decision(evict=Evict(slots(1)[:1], [1, 1])), r"must be int64 \[2, 2 or 1, n\], got"),
        (lambda view: Decision(evict=Evict(slots(1), [1])), "counts must be 2 numbers"),
        (lambda view: Decision(evict=Evict(slots(1), [2, 1])), "counts must be 2 numbers, at most 1 each"),
        (lambda view: Decision(evict=Evict(slots(1), [-1, 1])), "counts must be 2 numbers"),
        (lambda view: Decision(offload=Offload(torch.ones(2, 2) > 0, 4)), "cannot decide about offload; `prefill` and"),
        (lambda view: Decision(chunks=torch.ones(2, 2).long()), "cannot decide about chunks; `prefill` and"),
        (lambda view: Decision(keys=view.slots.keys()), "cannot decide about keys; `prefill` can"),
        (lambda view: Decision(fields={"a": Field()}), "cannot decide about fields; `prefill` can"),
    ],
)
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_decode(decision: Any, message: str, kv_dtype: str | None, inputs: dict[str, Tensor], expected: Tensor) -> None:
    method = Own(on_step=decision)
    fails(method, inputs, expected, message, kv_dtype=kv_dtype)
    assert method.calls.count("decode") == 2  # each run stops at once


def test_what_was_not_declared(inputs: dict[str, Tensor], expected: Tensor) -> None:
    """An engine relies on it: a cache that may be cropped, one without a store, one that stores what was computed."""
    prompt_only: Any = {"acts": ("prefill", "after_prefill"), "replaces": False}
    evicts = Own(on_step=lambda view: Decision(keep=view.slots.valid()), **prompt_only)
    fails(evicts, inputs, expected, '`decides` must contain "decode"')
    single = Own(on_step=lambda view: Decision(evict=Evict(0, [1, 1])), **prompt_only)
    fails(single, inputs, expected, '`decides` must contain "decode"')
    stores = Own(on_prefill=lambda view: Decision(offload=offload(view)), **prompt_only)
    fails(stores, inputs, expected, '`decides` must contain "read"')
    replaces = Own(on_prefill=lambda view: Decision(keys=view.keys.clone()), **prompt_only)
    fails(replaces, inputs, expected, "`merges` must be True")


@pytest.mark.parametrize("wrong", [lambda view: None, lambda view: right(view)[:, 1:], lambda view: right(view).long(),
                                   lambda view: right(view)[0]])  # fmt: skip
@pytest.mark.parametrize("backend", ["auto", "blocks"])
def test_read(wrong: Any, backend: str, inputs: dict[str, Tensor], expected: Tensor) -> None:
    two = torch.full((2, 2), 2)
    method = Own(
        on_prefill=lambda view: Decision(keep=rest(view), offload=offload(view), chunks=two),
        on_read=wrong,
    )
    fails(method, inputs, expected, r"`read` must return floating-point \[4, ", backend=backend)


def rest(view: PrefillView) -> Tensor:
    """The tokens of each sequence that are in no complete chunk of four."""
    prompt = view.prompt
    return (from_end(prompt.real) <= (prompt.lengths % 4)[:, None])[:, None]


def right(view: ReadView) -> Tensor:
    return view.chunks.relevance(view.query, view.scaling)


def test_the_same_object_is_right_when_its_decisions_are(inputs: dict[str, Tensor], expected: Tensor) -> None:
    """None of the checks refuses what is allowed."""
    two = torch.full((2, 2), 2)
    shared = {"keys": lambda view: view.keys.clone(), "values": lambda view: view.values.clone()}
    reads = Own(
        on_prefill=lambda view: Decision(
            keep=rest(view), **{name: make(view) for name, make in shared.items()},
            stream=view.prompt.real if view.compressed_idx == 0 else None, offload=offload(view),
        ),
        on_end=lambda view: [Decision(chunks=two)] * 4,
        prunes=0,
    )  # fmt: skip
    evicts = Own(
        on_prefill=lambda view: Decision(fields={"a": Field(), "b": Field(view.keys.norm(dim=-1))}),
        on_step=lambda view: Decision(evict=Evict(0, [1, 1])) if view.layer_idx else Decision(keep=view.slots.valid()),
    )
    for method in (reads, evicts):
        run = matrix.compressed(matrix.model(FAMILY), method, inputs)
        assert run.tokens.shape == expected.shape
        assert run.session.report.evicted + run.session.report.retrieved > 0


INCONSISTENT: list[tuple[str, Callable[[], Own]]] = [
    ("in its offloaded chunks", lambda: Own(on_prefill=lambda view: Decision(offload=offload(view), chunks=ONE))),
    (
        "`offload` without `chunks`",
        lambda: Own(on_prefill=lambda view: Decision(keep=rest(view), offload=offload(view))),
    ),
    ("`chunks` without `offload`", lambda: Own(on_end=lambda view: [Decision(chunks=ONE)] * 4)),
    (
        "are decided once",
        lambda: Own(
            on_prefill=lambda view: Decision(keep=rest(view), offload=offload(view), chunks=ONE),
            on_end=lambda view: [Decision(chunks=ONE)] * 4,
        ),
    ),
    ("negative", lambda: Own(on_end=lambda view: [Decision(chunks=-ONE)] * 4)),
    ("names a slot twice", lambda: Own(on_step=lambda view: Decision(evict=Evict(torch.ones(2, 1, 2).long(), [2, 2])))),
    ("whole numbers", lambda: Own(on_step=lambda view: Decision(evict=Evict(0, [1.0, 1.0])))),
    ("not stored in their head", lambda: Own(on_prefill=ragged, on_step=beyond)),
    ("reads chunks", lambda: Own(acts=ALL)),
    ("one of prefill", lambda: Own(acts=("prefil",))),
    ("the last layer has no later ones", lambda: Own(prunes=3)),
]
ONE = torch.ones(2, 2, dtype=torch.int64)


def ragged(view: PrefillView) -> Decision:
    """The second head of each sequence keeps all, the first one four tokens."""
    keep = view.prompt.real[:, None].repeat(1, 2, 1)
    keep[:, 0] &= from_end(view.prompt.real) <= 4
    return Decision(keep=keep)


def beyond(view: DecodeView) -> Decision:
    slots = torch.tensor([[[4], [30]]]).repeat(2, 1, 1)
    slots[:, 0] = 20
    return Decision(evict=Evict(slots, [1, 1]))


@pytest.mark.parametrize(("words", "make"), INCONSISTENT, ids=[words for words, _ in INCONSISTENT])
def test_decisions_that_contradict_each_other(inputs: dict[str, Tensor], words: str, make: Callable[[], Own]) -> None:
    """Nothing is lost or attended to twice in silence."""
    model = matrix.model(FAMILY)
    with pytest.raises(MethodError, match=words):
        matrix.compressed(model, make(), inputs)
    assert "generate" not in vars(model)


def test_heads_without_a_complete_chunk_have_nothing_to_read(inputs: dict[str, Tensor]) -> None:
    """Chunks longer than the prompt: nothing is offloaded, and the check has no positions to look at."""
    huge = Own(on_prefill=lambda view: Decision(offload=Offload(offload(view).heads, 10_000), chunks=ONE))
    run = matrix.compressed(matrix.model(FAMILY), huge, inputs)
    assert run.session.report.retrieved == 0
