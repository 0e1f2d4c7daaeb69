"""Quest: bounds worked out by hand, chosen pages against exact bounds from the model's own keys, bytes and budgets."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference, masked, recorded
from torch import Tensor

import foveakv
from foveakv import Quest
from foveakv.memory.chunks import ChunkStore
from foveakv.memory.digests import summarised, widened_query
from foveakv.methods import ReadView

PAGE = 4


def test_bounds_by_hand() -> None:
    """Two keys (1, -2) and (3, 0): a key within their bounds reaches at most 3 q_1 or 1 q_1, and 0 or -2 q_2."""
    keys = torch.tensor([[[1.0, -2.0], [3.0, 0.0]]])
    bounds = summarised(keys, "bounds")
    assert bounds.tolist() == [[3.0, 0.0, 1.0, -2.0]]
    for query, want in (([1.0, 1.0], 3.0), ([1.0, -1.0], 5.0), ([-1.0, 1.0], -1.0), ([-2.0, -1.0], 0.0)):
        assert float(widened_query(torch.tensor(query), "bounds") @ bounds[0]) == want


def test_bounds_bound() -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(6, PAGE, 8), torch.randn(50, 8)
    highest = (query[:, None, None] * keys).sum(-1).amax(-1)  # [50, 6]
    bound = widened_query(query, "bounds") @ summarised(keys, "bounds").T
    assert bool((bound >= highest - 1e-5).all())
    by_channel = torch.maximum(query[:, None] * keys.amin(1), query[:, None] * keys.amax(1)).sum(-1)
    assert torch.allclose(bound, by_channel, atol=1e-5)


def test_stores_with_bounds() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(1, 2, 11, 3), torch.randn(1, 2, 11, 3)
    store = ChunkStore(
        keys, values, torch.ones(1, 11, dtype=torch.bool), torch.arange(11)[None],
        torch.ones(1, 2, dtype=torch.bool), chunk=PAGE, place="device", summary="bounds",
    )  # fmt: skip
    assert store.digests.shape == (2, 6, 2)
    for head in range(2):
        for page in range(2):
            own = keys[0, head, page * PAGE : (page + 1) * PAGE]
            assert torch.equal(store.digests[head, :, page], torch.cat([own.amax(0), own.amin(0)]))
    assert store.host_nbytes == 0
    assert store.digest_nbytes == 2 * 6 * 2 * 4


def chosen_by_hand(query: Tensor, keys: Tensor, pages: int) -> set[int]:
    """Pages of keys [C, D] that one query [D] should read."""
    count = len(keys) // PAGE
    bound = []
    for page in range(count):
        own = keys[page * PAGE : (page + 1) * PAGE]
        channels = zip(query.tolist(), own.amin(0).tolist(), own.amax(0).tolist(), strict=True)
        bound.append(sum(max(q * low, q * high) for q, low, high in channels))
    return set(sorted(range(count), key=lambda page: (-bound[page], page))[:pages])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choice_by_hand(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query head per KV head: every step reads the pages with the highest bounds, the incomplete one, and what
    was decoded. In float32 pages are read in place where the CPU kernel runs, in float64 they are copied."""
    model = families.build("llama", dtype=dtype, num_key_value_heads=families.HEADS)
    inputs = families.prompt("llama", images=0, text=38)
    columns = inputs["input_ids"].shape[1]
    with torch.no_grad():
        plain = model(**inputs, use_cache=True).past_key_values
    queries: dict[tuple[int, int], Tensor] = {}
    original = Quest.read

    def watch(self: Quest, view: ReadView) -> Tensor:
        queries[view.layer_idx, view.seen] = view.query[0, :, 0]
        return original(self, view)

    monkeypatch.setattr(Quest, "read", watch)
    run = matrix.compressed(model, Quest(budget=16, page_size=PAGE, full_layers=1), inputs, max_new_tokens=4)
    rest = columns % PAGE
    pages = (16 - rest) // PAGE
    assert 0 < pages < columns // PAGE
    for step, trace in enumerate(run.trace[1:], 1):
        seen = columns + step
        assert trace[0].shape[-1] == seen  # the first layer attends to everything
        for layer in range(1, families.LAYERS):
            for head in range(families.HEADS):
                keys = plain.layers[layer].keys[0, head, : columns - rest]
                wanted = chosen_by_hand(queries[layer, seen][head], keys, pages)
                tokens = {page * PAGE + i for page in wanted for i in range(PAGE)}
                held = trace[layer][0, head]
                assert set(held[held >= 0].tolist()) == tokens | set(range(columns - rest, seen))


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.8, 20])
def test_steps_stay_within_the_budget(budget: Any) -> None:
    """In every layer that chooses, wherever a page fits beside the incomplete one; decoded tokens come on top."""
    model, batch = matrix.model("llava"), families.batch("llava")
    run = matrix.compressed(model, Quest(budget=budget, page_size=PAGE, full_layers=1), batch.inputs)
    allowed = run.cache.request.budget_tokens(budget)
    lengths = run.cache.full_prompt.lengths
    assert bool((allowed - lengths % PAGE >= PAGE).all())
    for step, trace in enumerate(run.trace[1:], 1):
        for layer, positions in trace.items():
            held = (positions >= 0).sum(-1)
            if layer:
                assert bool((held - step <= allowed[:, None]).all())
                assert bool((held - step > allowed[:, None] - PAGE).all())
            else:
                assert bool((held == (lengths + step)[:, None]).all())


def test_a_budget_below_a_page_reads_one_page() -> None:
    model, inputs = matrix.model("llama"), families.prompt("llama", images=0, text=38)
    columns = inputs["input_ids"].shape[1]
    run = matrix.compressed(model, Quest(budget=1, page_size=PAGE, full_layers=0), inputs, max_new_tokens=2)
    assert run.trace[1][0].shape[-1] == PAGE + columns % PAGE + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_bytes_count_on_the_device(dtype: torch.dtype) -> None:
    """Keys, values and bounds of the whole prompt; copies of chosen pages too, where pages are not read in place."""
    model, inputs = matrix.model("llava", dtype), families.prompt("llava", images=4, dtype=dtype)
    run = matrix.compressed(model, Quest(budget=0.3, page_size=PAGE, full_layers=1), inputs)
    report = run.session.report
    assert report.evicted == 0
    assert report.host_bytes == 0
    assert report.retrieved > 0
    assert report.stored_bytes > report.full_bytes
    layers = [layer for layer in run.cache.compressed if layer.store is not None]
    assert len(layers) == families.LAYERS - 1
    pages = inputs["input_ids"].shape[1] // PAGE
    for layer in layers:
        store = layer.store
        held = store.stored.numel() // (store.stored.shape[1] // PAGE)
        assert held == pages * PAGE * families.KV_HEADS
        assert store.device_nbytes >= 2 * store.stored.nbytes + store.digest_nbytes
    details = report.details
    assert details["choosing_heads"] == 3 * families.KV_HEADS
    assert (
        details["bound_bytes"] == 3 * families.KV_HEADS * pages * 2 * (store.stored.shape[1] // PAGE) * dtype.itemsize
    )


def test_a_budget_for_everything_stores_no_pages() -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava")
    with foveakv.compress(model, Quest(budget=1.0)) as session:
        model.generate(**inputs, max_new_tokens=2)
        assert not any(layer.store for layer in session.cache.compressed)
        assert session.report.retrieved == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_beams_turns_and_copies(dtype: torch.dtype) -> None:
    """Tables of chosen pages follow their sequences; in place (float32 on a CPU kernel) and in slots (float64)."""
    model, inputs = matrix.model("llava", dtype), families.batch("llava", dtype=dtype).inputs
    method, tolerance = matrix.method("quest"), 1e-4 if dtype == torch.float32 else 1e-6
    run = matrix.compressed(model, method, inputs, num_beams=3)
    assert run.session.report.retrieved > 0
    matrix.check_against_reference(model, run, inputs, tolerance, num_beams=3)
    matrix.check_storage(run)
    rows = [families.row("llava", images=2), families.row("llava", images=1, seed=1)]

    def talk(said: tuple[matrix.Run | None, ...] = (None, None)) -> tuple[matrix.Run, ...]:
        turn = families.first_turn("llava", rows, dtype)
        first = matrix.plain(model, turn.inputs, follow=said[0])
        turn = families.next_turn("llava", model, turn, first.tokens, image=True)
        return first, matrix.plain(model, turn.inputs, follow=said[1], past_key_values=first.cache)

    with foveakv.compress(model, method, trace=True) as session, recorded(model) as got:
        said, trace = talk(), list(session.trace)
    with masked(model, trace), recorded(model) as want:
        again = talk(said)
    assert largest_difference(got, want) < tolerance
    for run in again:
        matrix.check_choices(run, tolerance)


@pytest.mark.parametrize(("budget", "size"), [(512, 16), (511, 8), (256, 8), (255, 4), (40, 4), (1, 4)])
def test_automatic_pages_are_the_papers_while_the_budget_holds_32(budget: int, size: int) -> None:
    from types import SimpleNamespace

    request: Any = SimpleNamespace(budget_tokens=lambda written: torch.tensor([budget, 9000]))
    assert Quest()._page(request) == size
    assert Quest(page_size=5)._page(request) == 5


def test_the_report_says_which_pages_are_read() -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava", images=4, text=12)
    for method, said in (
        (Quest(budget=0.3), True),
        (Quest(budget=0.3, page_size=8), False),
        (Quest(budget=1.0), False),
    ):
        report = matrix.compressed(model, method, inputs, max_new_tokens=2).session.report
        assert any("page_size=auto: pages of 4 tokens instead of 16" in note for note in report.notes) == said
        assert report.details["page_size"] == (8 if method.page_size == 8 else 4)
