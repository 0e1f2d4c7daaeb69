"""Preallocated slots (`preallocate=`): the same as slots that grow, and a decode step that compiles as one graph."""

from __future__ import annotations

import copy
import gc
from typing import Any

import families
import matrix
import pytest
import torch
from attached import fingerprint, used
from masked_reference import largest_difference, recorded
from torch import Tensor, _dynamo
from transformers import CompileConfig

import foveakv
from foveakv import errors
from foveakv.engines.transformers.preallocated import SLOT_MULTIPLE

pytestmark = pytest.mark.usefixtures("no_gradients")

FAMILIES = ["qwen2_5_vl", "llava", "qwen2"]
ROOM = 8


def run(model: Any, method: Any, inputs: dict[str, Any], preallocate: int | None = None, **options: Any) -> matrix.Run:
    return matrix.compressed(
        model, method, inputs, session_options={"preallocate": preallocate, "trace": False}, **options
    )


def check_same(got: matrix.Run, want: matrix.Run, tolerance: float = 1e-5) -> None:
    """Equal logits, choices and kept positions. One of the two followed the other, or the numbers are exact."""
    assert largest_difference(got.logits, want.logits) < tolerance
    if got.choices is None or got.choices.beams > 1:
        assert tolerance < 1e-8
        assert torch.equal(got.tokens, want.tokens)
    else:
        matrix.check_choices(got, tolerance)
    for layer in want.cache.compressed:
        assert torch.equal(got.cache.kept(layer.layer_idx), want.cache.kept(layer.layer_idx))
    assert got.session.report.stored_slots == want.session.report.stored_slots
    assert got.session.report.evicted == want.session.report.evicted
    assert got.session.report.full_bytes == want.session.report.full_bytes


def compiled(backend: str) -> dict[str, Any]:
    """What `generate` takes to compile on a CPU too, without graph breaks or not at all."""
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return {"compile_config": config}


def contents(cache: Any) -> list[Tensor]:
    return [
        tensor.clone()
        for layer in cache.compressed
        for tensor in (layer.slots.keys, layer.slots.values, layer.slots.positions_)
    ]


# ------------------------------------------------------------------------------------------------ equal to growing


@pytest.mark.parametrize("name", ["full", "snapkv", "adakv", "fastv", "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_as_growing_slots(family: str, name: str) -> None:
    """Rows of different lengths, left-padded; adakv's heads differ in length as well."""
    if family in families.TEXT and name in ("fastv", "random"):
        pytest.skip("drops visual tokens only")
    model, inputs = matrix.model(family), families.batch(family).inputs
    want = run(model, matrix.method(name), inputs)
    check_same(run(model, matrix.method(name), inputs, preallocate=ROOM, follow=want), want)


def test_hidden_states_dropped_at_the_prompt() -> None:
    model, inputs = matrix.model("llava"), families.batch("llava").inputs
    method = matrix.method("fastv", drop_hidden_states=True)
    want = run(model, method, inputs)
    got = run(model, method, inputs, preallocate=ROOM, follow=want)
    check_same(got, want)
    assert got.session.report.evicted > 0


@pytest.mark.parametrize("name", ["adakv", "full"])
def test_beams_are_followed_in_place(name: str) -> None:
    model = matrix.model("qwen2_5_vl", torch.float64)
    inputs = families.batch("qwen2_5_vl", dtype=torch.float64).inputs
    options = {"num_beams": 3, "num_return_sequences": 2}
    got = run(model, matrix.method(name), inputs, preallocate=ROOM, **options)
    check_same(got, run(model, matrix.method(name), inputs, **options), 1e-9)


def test_a_prompt_in_chunks() -> None:
    model, inputs = matrix.model("llama"), families.prompt("llama")
    want = run(model, matrix.method("snapkv"), inputs, prefill_chunk_size=7)
    check_same(run(model, matrix.method("snapkv"), inputs, preallocate=ROOM, prefill_chunk_size=7, follow=want), want)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_later_turns(family: str) -> None:
    """Several new tokens at once, a new image among them."""
    model = matrix.model(family, torch.float64)
    runs = []
    for preallocate in (None, 60):
        with (
            foveakv.compress(model, matrix.method("snapkv"), preallocate=preallocate, turns="store") as session,
            recorded(model) as logits,
        ):
            turn = families.first_turn(family, [families.row(family, seed=seed) for seed in (0, 1)], torch.float64)
            past: dict[str, Any] = {}
            for step in range(3):
                output = model.generate(**turn.inputs, **matrix.GREEDY, **past)
                past = {"past_key_values": matrix.cache_of(output)}
                turn = families.next_turn(family, model, turn, output.sequences, image=step == 0, seed=step)
            runs.append(matrix.Run(output.sequences, logits, session.cache, session))
    check_same(runs[1], runs[0], 1e-9)


def test_padding_in_a_later_turn_is_not_attended_to() -> None:
    model, inputs = matrix.model("llama"), families.batch("llama").inputs
    more = {"input_ids": torch.tensor(families.words(5, 0)).expand(3, 5)}
    padding = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    mask = torch.cat([inputs["attention_mask"], padding], 1)
    logits = []
    for preallocate in (None, ROOM):
        cache = foveakv.cache_for(model, matrix.method("snapkv"), preallocate=preallocate, turns="store")
        model(**inputs, past_key_values=cache)
        steps = [model(**more, attention_mask=mask, past_key_values=cache).logits[:, -1]]
        longer = torch.nn.functional.pad(mask, (0, 1), value=1)
        steps.append(model(input_ids=torch.full((3, 1), 20), attention_mask=longer, past_key_values=cache).logits)
        logits.append(steps)
    assert largest_difference(logits[1], logits[0]) < 1e-5
    columns = inputs["input_ids"].shape[1]
    assert (cache.kept(0)[1] >= columns).sum(-1).tolist() == [4, 4]  # five of the turn less two, and one step


def test_copies_and_crops() -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava")
    cache = foveakv.cache_for(model, matrix.method("snapkv"), preallocate=4)
    token = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
    other = copy.deepcopy(cache)
    first = [model(input_ids=token, past_key_values=cache).logits for _ in range(4)]
    cache.crop(-2)
    assert cache.seen == inputs["input_ids"].shape[1] + 2
    assert largest_difference([model(input_ids=token, past_key_values=cache).logits for _ in range(2)], first[2:]) == 0
    assert largest_difference([model(input_ids=token, past_key_values=other).logits for _ in range(4)], first) == 0
    cache.reset()
    model(**inputs, past_key_values=cache)
    assert largest_difference([model(input_ids=token, past_key_values=cache).logits], first[:1]) == 0


def test_another_batch_size_made_under_inference_mode_goes_on_outside() -> None:
    model, inputs = matrix.model("llama"), families.prompt("llama")
    more = torch.full((2, 1), 20)
    logits = []
    for preallocate in (None, ROOM):
        cache = foveakv.cache_for(model, matrix.method("snapkv"), preallocate=preallocate)
        with torch.inference_mode():
            model(**inputs, past_key_values=cache)
            cache.batch_repeat_interleave(2)
        logits.append([model(input_ids=more, past_key_values=cache).logits for _ in range(2)])
    assert largest_difference(logits[1], logits[0]) < 1e-5


def test_bytes_are_those_of_the_storage() -> None:
    model, inputs = matrix.model("qwen2_5_vl"), families.batch("qwen2_5_vl").inputs
    got = run(model, matrix.method("adakv"), inputs, preallocate=ROOM)
    matrix.check_storage(got)
    for layer in got.cache.compressed:
        slots = layer.slots.keys.shape[2]
        assert slots % SLOT_MULTIPLE == 0
        assert slots >= int(layer.slots._lengths.max()) + ROOM
    assert got.session.report.peak_bytes >= got.session.report.stored_bytes


# ----------------------------------------------------------------------------------------------------------- compiled


def test_a_step_is_one_graph_for_all_steps_and_sessions() -> None:
    """`fullgraph` raises at any graph break. The eager backend checks the capture without generating code."""
    model, inputs = families.build("qwen2_5_vl"), families.batch("qwen2_5_vl").inputs
    want = run(model, matrix.method("adakv"), inputs)
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    for _ in range(2):
        got = run(model, matrix.method("adakv"), inputs, preallocate=ROOM, follow=want, **compiled("eager"))
        check_same(got, want)
    assert not _dynamo.utils.counters["graph_break"]
    assert _dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_shortened_sequences_and_chunked_prompts_compile_too() -> None:
    for family, name, options, call in (
        ("llava", "fastv", {"drop_hidden_states": True}, {}),
        ("llama", "snapkv", {}, {"prefill_chunk_size": 16}),
    ):
        model, inputs = families.build(family), families.prompt(family)
        method = matrix.method(name, **options)
        want = run(model, method, inputs, **call)
        _dynamo.reset()
        _dynamo.utils.counters.clear()
        got = run(model, method, inputs, preallocate=ROOM, follow=want, **call, **compiled("eager"))
        check_same(got, want)
        assert _dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_prompts_of_any_length_share_two_graphs() -> None:
    model = families.build("qwen2")
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    shapes = set()
    for tokens in (20, 90, 150, 40, 230):
        inputs = families.encode("qwen2", [families.Row((tokens,))])
        want = run(model, matrix.method("full"), inputs)
        got = run(model, matrix.method("full"), inputs, preallocate=ROOM, follow=want, **compiled("eager"))
        check_same(got, want)
        shapes.add(got.cache.layers[0].slots.keys.shape)
    assert len(shapes) == 4
    assert _dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the second holds for all lengths


@pytest.mark.slow
def test_generated_code() -> None:
    model, inputs = families.build("qwen2"), families.batch("qwen2").inputs
    _dynamo.reset()
    want = run(model, matrix.method("adakv"), inputs)
    check_same(run(model, matrix.method("adakv"), inputs, preallocate=ROOM, follow=want, **compiled("inductor")), want)


def test_a_compiled_step_by_hand() -> None:
    model, inputs = families.build("qwen2"), families.prompt("qwen2")
    cache = foveakv.cache_for(model, matrix.method("snapkv"), preallocate=2)
    token = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
    same = copy.deepcopy(cache)
    columns = inputs["input_ids"].shape[1]
    step = model.get_compiled_call(compiled("eager")["compile_config"])
    for i in range(2):
        arguments = {"input_ids": token, "position_ids": torch.tensor([[columns + i]])}
        got = step(**arguments, past_key_values=cache).logits
        want = model(**arguments, past_key_values=same).logits
        assert largest_difference([got], [want]) < 1e-5
    before = contents(cache)
    with pytest.raises(errors.UnsupportedModeError, match="preallocate=3"):
        step(input_ids=token, position_ids=torch.tensor([[columns + 2]]), past_key_values=cache)
    assert all(torch.equal(a, b) for a, b in zip(before, contents(cache), strict=True))
    with pytest.raises(errors.UnsupportedModeError, match="position_ids"):
        step(input_ids=token, past_key_values=same)


# ---------------------------------------------------------------------------------------------------- room and refusals


def test_no_room_is_an_error_before_anything_is_overwritten() -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava")
    with foveakv.compress(model, matrix.method("snapkv"), preallocate=3) as session:
        with pytest.raises(errors.UnsupportedModeError, match="preallocate=4 or more"):
            model.generate(**inputs, max_new_tokens=5)
        with pytest.raises(errors.UnsupportedModeError, match="preallocate=4 or more"):
            model.generate(**inputs, max_length=inputs["input_ids"].shape[1] + 5)
        model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)  # the fourth token is not fed back
        cache, before, seen = session.cache, contents(session.cache), session.cache.seen
        for new in (1, 2):
            with pytest.raises(errors.UnsupportedModeError, match=r"has slots for 3 .*Nothing was overwritten"):
                model(input_ids=torch.full((1, new), 20), past_key_values=cache)
        assert all(torch.equal(a, b) for a, b in zip(before, contents(cache), strict=True))
        assert cache.seen == seen
        cache.crop(-1)
        model(input_ids=torch.full((1, 1), 20), past_key_values=cache)


def test_a_turn_that_cannot_fit_is_refused_before_it_runs() -> None:
    model, inputs = matrix.model("llama"), families.prompt("llama")
    cache = foveakv.cache_for(model, matrix.method("snapkv"), preallocate=6)
    tokens = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, past_key_values=cache)  # stores three
    turn = torch.nn.functional.pad(tokens, (0, 2), value=20)  # the fourth and two more
    seen = cache.seen
    with pytest.raises(
        errors.UnsupportedModeError, match=r"max_new_tokens=2 after the 6 tokens .*preallocate=7 or more"
    ):
        model.generate(turn, max_new_tokens=2, past_key_values=cache)
    assert cache.seen == seen
    model.generate(turn, max_new_tokens=1, past_key_values=cache)
    assert cache.seen == seen + 3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("h2o", {}),
        ("hae", {}),
        ("streaming", {}),
        ("hybridkv", {}),
        ("snapkv", {"kv_dtype": "int8"}),
        ("snapkv", {"max_decode_slots": 4}),
        ("snapkv", {"trace": True}),
        ("snapkv", {"backend": "blocks"}),
        ("snapkv", {"preallocate": 0}),
        ("snapkv", {"preallocate": "many"}),
        ("snapkv", {"preallocate": 2.5}),
    ],
)
def test_what_does_not_go_together(name: str, options: dict[str, Any]) -> None:
    model = matrix.model("llava")
    for make in (foveakv.compress, foveakv.cache_for):
        with pytest.raises(errors.MethodError, match="preallocate"):
            make(model, matrix.method(name), **{"preallocate": ROOM, **options})


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_models_with_other_layers_are_refused(family: str) -> None:
    model = matrix.model(family)
    with pytest.raises(errors.UnsupportedModelError, match="plain attention in every layer"):
        foveakv.cache_for(model, matrix.method("snapkv"), preallocate=ROOM)
    with (
        foveakv.compress(model, matrix.method("snapkv"), preallocate=ROOM),
        pytest.raises(errors.UnsupportedModelError, match="plain attention in every layer"),
    ):
        model.generate(**families.prompt(family), max_new_tokens=2)


def test_calls_that_are_refused() -> None:
    model, inputs = matrix.model("llama"), families.prompt("llama")
    columns = inputs["input_ids"].shape[1]
    mask = torch.ones(1, 1, columns, columns, dtype=torch.bool).tril()
    with foveakv.compress(model, matrix.method("snapkv"), preallocate=ROOM):
        with pytest.raises(errors.UnsupportedModeError, match="2-D"):
            model(input_ids=inputs["input_ids"], attention_mask=mask)
        with pytest.raises(errors.UnsupportedModeError, match="assistant"):
            model.generate(**inputs, max_new_tokens=4, prompt_lookup_num_tokens=2)


def test_true_is_a_default_and_false_is_none() -> None:
    model = matrix.model("llava")
    assert foveakv.cache_for(model, matrix.method("snapkv"), preallocate=True).preallocated == 256
    assert foveakv.cache_for(model, matrix.method("snapkv"), preallocate=False).preallocated is None


@pytest.mark.parametrize("family", FAMILIES)
def test_leaving_restores_the_model(family: str, collected: None) -> None:
    model, inputs = used(family), families.prompt(family)
    want = fingerprint(model)
    with foveakv.compress(model, matrix.method("snapkv"), preallocate=ROOM):
        model.generate(**inputs, max_new_tokens=3)
        assert "forward" in vars(model)
    assert fingerprint(model) == want
    cache = foveakv.cache_for(model, matrix.method("snapkv"), preallocate=ROOM)
    model.generate(**inputs, max_new_tokens=3, past_key_values=cache)
    del cache
    gc.collect()
    assert fingerprint(model) == want
