"""Methods in decode steps of the vLLM plugin, with a cache in plain tensors in place of vLLM's."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from foveakv.core.budget import Geometry
from foveakv.core.prompt import PromptMap
from foveakv.engines.vllm.deciding import read_prompt
from foveakv.engines.vllm.decoding import attention_sums, decide_step
from foveakv.engines.vllm.stored import Compressed, Eviction, Step, products
from foveakv.errors import MethodError
from foveakv.memory.segments import Segments
from foveakv.methods import Decision, Method
from foveakv.methods.streaming import Streaming
from foveakv.methods.views import Evict, Observes

SIZE, LAYERS, HEADS, DIM, PROMPT = 4, 2, 2, 8, 9
SIZES = Geometry(1, (0,), LAYERS, HEADS, DIM, DIM, 4)


class Store:
    """Keys of slots 0, 1, ... of every layer, [layers, n, H, D]."""

    size, heads = SIZE, HEADS
    index: ClassVar[dict[str, int]] = {}

    def __init__(self, tokens: int) -> None:
        self.tensor = torch.randn(LAYERS, tokens, HEADS, DIM)

    def keys(self, idx: int, blocks: Tensor, tokens: int) -> Tensor:
        return self.tensor[idx, :tokens]

    def dot(self, idx: int, blocks: Tensor, tokens: int, query: Tensor) -> Tensor:
        return products(query, self.keys(idx, blocks, tokens))


class OneRank:
    def gather_heads(self, local: Tensor) -> Tensor:
        return local


@dataclass
class Fixed(Method):
    """Returns the decision that it was made with, one per layer or the same for all, and keeps the views."""

    name: ClassVar[str] = "fixed"
    decision: Any = None
    views: list[Any] = field(default_factory=list)

    @property
    def granularity(self) -> Any:
        return "token"

    @property
    def decides(self) -> Any:
        return "prefill", "decode"

    @property
    def observes(self) -> Observes:
        return Observes(attention_sum=True)

    def decode(self, view: Any) -> Decision | None:
        self.views.append(view)
        return self.decision[view.compressed_idx] if isinstance(self.decision, list) else self.decision


def step_of(method: Method, kept: Tensor | None = None, new: int = 1) -> Step:
    prompt = PromptMap(torch.zeros(1, PROMPT, dtype=torch.int8))
    reading = read_prompt(method, prompt, SIZES)
    known = Compressed("a", torch.arange(PROMPT) if kept is None else kept, PROMPT, decoding=reading)
    step = Step(known, PROMPT, PROMPT + new, 0, torch.arange(3), known.evicted)
    step.queries = {idx: torch.randn(new, HEADS * 2, DIM) for idx in range(LAYERS)}
    return step


def decide(step: Step, **more: Any) -> Eviction | None:
    store: Any = Store(PROMPT + 3)
    return decide_step(step, store, LAYERS, 0.5, OneRank(), **more)


@pytest.mark.parametrize("new", [1, 3])
def test_attention_sums_are_those_of_the_newest_queries(new: int) -> None:
    query, keys = torch.randn(new, HEADS * 3, DIM), torch.randn(10, HEADS, DIM)
    found = attention_sums(products(query, keys) * 0.5, HEADS)
    expected = torch.zeros(HEADS, 10)
    for row in range(new):
        for head in range(HEADS * 3):
            visible = keys[: 10 - new + row + 1, head // 3]
            expected[head // 3, : visible.shape[0]] += (visible @ query[row, head] * 0.5).softmax(0)
    torch.testing.assert_close(found, expected)


def test_methods_see_the_stored_tokens_and_their_attention() -> None:
    method = Fixed()
    step = step_of(method, torch.tensor([0, 1, 4, 6, 7]))
    assert decide(step) is None
    assert [view.compressed_idx for view in method.views] == [0, 1]
    for view in method.views:
        assert view.seen == PROMPT + 1
        assert view.query.shape == (1, HEADS * 2, 1, DIM)
        assert view.query[0].transpose(0, 1).equal(step.queries[view.compressed_idx])
        assert view.slots.sequence_lengths == [6]
        assert view.slots.positions()[0, 1].tolist() == [0, 1, 4, 6, 7, 9]
        assert view.slots.keys().shape == (1, HEADS, 6, DIM)
        assert view.attention_sum.shape == view.slots.valid().shape == (1, HEADS, 6)
        torch.testing.assert_close(view.attention_sum.sum(-1), torch.full((1, HEADS), 2.0))
        with pytest.raises(MethodError, match="no values per token"):
            view.slots.add("score", view.attention_sum)


def test_attention_of_some_steps_counts_for_all() -> None:
    method = Fixed()
    step = step_of(method)
    decide(step, attention_every=4)
    assert not method.views[0].attention_sum.any()
    step.known.seen, step.start, step.stop = PROMPT + 3, PROMPT + 3, PROMPT + 4
    store: Any = Store(PROMPT + 4)
    decide_step(step, store, LAYERS, 0.5, OneRank(), 4)
    torch.testing.assert_close(method.views[-1].attention_sum.sum(-1), torch.full((1, HEADS), 8.0))


@pytest.mark.parametrize("gone", [[2], [9], [0, 9, 4], [8, 1, 9, 3], [7, 8, 9]])
def test_tokens_move_as_in_the_transformers_engine(gone: list[int]) -> None:
    evict = Evict(torch.tensor(gone)[None, None], [len(gone)])
    found = decide(step_of(Fixed(Decision(evict=evict))))
    assert found is not None
    numbers = torch.arange(PROMPT + 1)
    numbers[found.target] = numbers[found.source]
    rows = torch.randn(1, HEADS, PROMPT + 1, DIM)
    full = torch.ones(1, HEADS, PROMPT + 1, dtype=torch.bool)
    segments = Segments.from_dense(rows, rows, full, torch.arange(PROMPT + 1)[None])
    segments.evict(evict.slots, evict.counts)
    assert numbers[: found.stored].tolist() == segments.positions()[0, 0].tolist()


def test_masks_keep_the_order() -> None:
    keep = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool)[None, None]
    found = decide(step_of(Fixed(Decision(keep=keep))))
    assert found is not None
    assert (found.tokens, found.stored) == (PROMPT + 1, 8)
    assert found.source.tolist() == [2, 3, 5, 6, 7, 8, 9]
    assert found.target.tolist() == list(range(1, 8))


def test_windows_move_on() -> None:
    step = step_of(Streaming(budget=PROMPT, sink=2))
    found = decide(step)
    assert found is not None
    assert (found.stored, found.source.tolist(), found.target.tolist()) == (PROMPT, [PROMPT], [2])


def mask(*gone: int, heads: int = 1) -> Decision:
    keep = torch.ones(1, heads, PROMPT + 1, dtype=torch.bool)
    keep[..., -1, list(gone)] = False
    return Decision(keep=keep)


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ([mask(1), mask(2)], "layers 0 and 1"),
        ([mask(1), None], "layers 0 and 1"),
        (mask(3, heads=HEADS), "heads keep different"),
        (mask(*range(PROMPT + 1)), "no token"),
        (Decision(keep=torch.ones(1, 1, 3, dtype=torch.bool)), "keep must be"),
        (Decision(keys=torch.zeros(1)), "about keys"),
        (Decision(keep=mask(1).keep, evict=Evict(0, [1])), "both"),
        (Decision(evict=Evict(PROMPT + 1, [1])), "stored slots"),
        (Decision(evict=Evict(torch.tensor([[[1, 1]]]), [2])), "stored slots"),
        (Decision(evict=Evict(torch.tensor([[[1], [2]]]), [1])), "heads evict different"),
    ],
)
def test_what_a_block_table_cannot_hold_is_an_error(decision: Any, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        decide(step_of(Fixed(decision)))
