"""Every way of generating that is promised to work, and clear errors for the others."""

from __future__ import annotations

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import families
import matrix
import pytest
import torch
import transformers
from masked_reference import largest_difference, masked, recorded

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

FAMILIES = ["qwen2_5_vl", "llava", "gemma3", "llama"]
METHODS = ["hae", "hybridkv", "snapkv", "h2o"]
GROWING = ["hae", "h2o"]  # evict while decoding as well
FAMILY_AND_METHOD = pytest.mark.parametrize(("family", "name"), list(itertools.product(FAMILIES, METHODS)))


def inputs_of(family: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return families.batch(family, dtype=dtype).inputs


# ---------------------------------------------------------------------------------------------- sampling and beams


@FAMILY_AND_METHOD
def test_beams(family: str, name: str) -> None:
    model, inputs = matrix.model(family, torch.float64), inputs_of(family)
    run = matrix.compressed(model, matrix.method(name), inputs, num_beams=3)
    matrix.check_against_reference(model, run, inputs, num_beams=3)
    matrix.check_storage(run)


def test_beams_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above tests something: beams are reordered, and not by the identity."""
    orders = []
    original = foveakv.CompressedCache.reorder_cache

    def reorder(self: Any, beam_idx: torch.Tensor) -> None:
        orders.append(beam_idx.tolist())
        original(self, beam_idx)

    monkeypatch.setattr(foveakv.CompressedCache, "reorder_cache", reorder)
    matrix.compressed(
        matrix.model("qwen2_5_vl"), matrix.method("hae"), inputs_of("qwen2_5_vl", torch.float32), num_beams=3
    )
    assert any(order != sorted(order) or len(set(order)) < len(order) for order in orders)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_and_sampling_of_the_full_method_are_the_plain_models(family: str) -> None:
    """Two runs that choose and draw for themselves, in fp64, where no near tie can part them."""
    model, inputs = matrix.model(family, torch.float64), inputs_of(family)
    for options in (
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 1.3, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2},
    ):
        want = matrix.plain(model, inputs, **options)
        got = matrix.compressed(model, foveakv.methods.get("full"), inputs, **options)
        assert torch.equal(got.tokens, want.tokens), options
        assert largest_difference(got.logits, want.logits) < 1e-9


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 1.3, "top_p": 0.9},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
    ids=["sampling", "return-sequences", "beams", "penalties"],
)
def test_search_options(name: str, options: dict[str, Any]) -> None:
    model, inputs = matrix.model("llava", torch.float64), inputs_of("llava")
    run = matrix.compressed(model, matrix.method(name), inputs, **options)
    matrix.check_against_reference(model, run, inputs, **options)


@pytest.mark.parametrize("name", METHODS)
def test_rows_that_end_early(name: str) -> None:
    model, inputs = matrix.model("qwen2_5_vl", torch.float64), inputs_of("qwen2_5_vl")
    free = matrix.compressed(model, matrix.method(name), inputs)
    width = inputs["input_ids"].shape[1]
    ends = {"eos_token_id": int(free.tokens[1, width + 1])}
    run = matrix.compressed(model, matrix.method(name), inputs, **ends)
    assert (run.tokens[1, width + 2 :] == families.PAD).all()
    matrix.check_against_reference(model, run, inputs, **ends)


class _Words:
    """As much of a tokenizer as a streamer needs."""

    def decode(self, ids: list[int], **unused: Any) -> str:
        return "".join(f"{int(i)} " for i in ids)


class _Streamer(transformers.TextStreamer):
    def __init__(self) -> None:
        super().__init__(_Words(), skip_prompt=True)  # type: ignore[arg-type]
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text


@pytest.mark.parametrize("name", METHODS)
def test_streaming_of_text(name: str) -> None:
    streamer = _Streamer()
    inputs = families.prompt("llava")
    run = matrix.compressed(matrix.model("llava"), matrix.method(name), inputs, streamer=streamer)
    assert [int(word) for word in streamer.text.split()] == run.tokens[0, inputs["input_ids"].shape[1] :].tolist()


# ----------------------------------------------------------------------------------------------------------- turns


def converse(
    family: str, model: Any, images: tuple[bool, ...], cache: Any = None
) -> tuple[list[families.Turn], list[Any]]:
    """Turns over one cache, with or without a new image each; for every turn its inputs and what it gave."""
    rows = [families.row(family, images=2), families.row(family, images=1, seed=1)]
    turn = families.first_turn(family, rows, torch.float64)
    turns, outputs = [turn], []
    for step, image in enumerate([*images, None]):
        past = {} if cache is None else {"past_key_values": cache}
        output = model.generate(**turn.inputs, **matrix.GREEDY, **past)
        outputs.append(output)
        cache = matrix.cache_of(output)
        if image is not None:
            turn = families.next_turn(family, model, turn, output.sequences, image=image, seed=step)
            turns.append(turn)
    return turns, outputs


TURNS = {"text-image": (False, True), "image-text": (True, False), "text-text": (False, False)}
TALKS = [(f, n, t) for f in FAMILIES for n in METHODS for t in TURNS if (t == "text-text") == (f in families.TEXT)]


@pytest.mark.parametrize(("family", "name", "talk"), TALKS)
def test_second_and_third_turn(family: str, name: str, talk: str) -> None:
    """The documented way: `generate` with all ids and the cache of the turn before."""
    model = matrix.model(family, torch.float64)
    with foveakv.compress(model, matrix.method(name), trace=True) as session, recorded(model) as got:
        turns, outputs = converse(family, model, TURNS[talk])
        trace = list(session.trace)
        assert session.cache is matrix.cache_of(outputs[-1])
        assert session.report.tokens_seen == outputs[-1].sequences.shape[1] - 1
    cache = None
    with masked(model, trace), recorded(model) as want:
        for turn, output in zip(turns, outputs, strict=True):
            past = {} if cache is None else {"past_key_values": cache}
            replay = model.generate(**turn.inputs, **matrix.GREEDY, **past)
            assert torch.equal(replay.sequences, output.sequences)
            cache = matrix.cache_of(replay)
    assert largest_difference(got, want) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_ones_own(family: str) -> None:
    """`cache_for` works without a `with` block, turn after turn, and keeps what `compress` keeps."""
    model = matrix.model(family, torch.float64)
    images = (family not in families.TEXT, False)
    with foveakv.compress(model, matrix.method("snapkv")) as session, recorded(model) as want:
        converse(family, model, images)
        kept = [session.kept(layer.layer_idx) for layer in session.cache.compressed]
    cache = foveakv.cache_for(model, matrix.method("snapkv"))
    with recorded(model) as got:
        converse(family, model, images, cache)
    assert largest_difference(got, want) < 1e-9
    assert all(torch.equal(a, cache.kept(layer.layer_idx)) for a, layer in zip(kept, cache.compressed, strict=True))


@FAMILY_AND_METHOD
def test_padding_between_turns(family: str, name: str) -> None:
    """Rows whose new words differ in number are padded in the middle of the context."""
    model, inputs = matrix.model(family, torch.float64), inputs_of(family)
    words = torch.tensor([[0, 0, 0, 31, 32], [41, 42, 43, 44, 45], [0, 0, 0, 0, 51]])

    def talk() -> list[torch.Tensor]:
        answers, given, cache = [], dict(inputs), {}
        for new in (words, words[:, 2:], None):
            output = model.generate(**given, **matrix.GREEDY, **cache)
            answers.append(output.sequences)
            if new is not None:
                cache = {"past_key_values": matrix.cache_of(output)}
                ids = torch.cat([output.sequences, new], 1)
                answered = output.sequences.shape[1] - given["attention_mask"].shape[1]
                mask = torch.cat([given["attention_mask"], torch.ones(3, answered), new != 0], 1).long()
                given = {"input_ids": ids, "attention_mask": mask} | families.token_types(family, ids)
        return answers

    with foveakv.compress(model, matrix.method(name), trace=True) as session, recorded(model) as got:
        tokens = talk()
        trace = list(session.trace)
    with masked(model, trace), recorded(model) as want:
        assert all(torch.equal(a, b) for a, b in zip(talk(), tokens, strict=True))
    assert max((a[:, -1] - b[:, -1]).abs().max().item() for a, b in zip(got, want, strict=True)) < 1e-6


def second_turn(model: Any, output: Any, cache: Any, skip: int = 0) -> list[torch.Tensor]:
    """Logits of a turn of three more words after `output`, of whose ids the first `skip` are left out."""
    ids = torch.cat([output.sequences, torch.tensor([[31, 32, 33]])], 1)
    inputs = {"input_ids": ids[:, skip:], "attention_mask": torch.ones_like(ids)}
    return matrix.plain(model, inputs, past_key_values=cache).logits


@pytest.mark.parametrize("name", METHODS)
def test_only_the_new_tokens_of_a_turn(name: str) -> None:
    """With the mask of the whole context beside them, as transformers allows."""
    model, inputs, logits = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64), []
    with foveakv.compress(model, matrix.method(name)):
        for skip in (False, True):
            output = model.generate(**inputs, **matrix.GREEDY)
            cache = matrix.cache_of(output)
            logits.append(second_turn(model, output, cache, cache.get_seq_length() if skip else 0))
    assert largest_difference(*logits) < 1e-9


@pytest.mark.parametrize("name", METHODS)
def test_copies_of_a_cache(name: str) -> None:
    """One prompt, several continuations: each on its own deep copy, as transformers documents it."""
    model, inputs = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64)
    with foveakv.compress(model, matrix.method(name)):
        output = model.generate(**inputs, **matrix.GREEDY)
        cache = matrix.cache_of(output)
        copies = [copy.deepcopy(cache) for _ in range(2)]
        want = second_turn(model, output, cache)
        for copied in copies:
            assert largest_difference(second_turn(model, output, copied), want) < 1e-9


@pytest.mark.parametrize("name", matrix.METHODS)
def test_max_decode_slots(name: str) -> None:
    model, inputs = matrix.model("llava", torch.float64), inputs_of("llava")
    if matrix.method(name).evicts_while_decoding:
        with pytest.raises(errors.MethodError, match="max_decode_slots"):
            foveakv.compress(model, matrix.method(name), max_decode_slots=3)
        return
    with foveakv.compress(model, matrix.method(name), trace=True, max_decode_slots=3) as session:
        output = model.generate(**inputs, **{**matrix.GREEDY, "max_new_tokens": 9})
        run = matrix.Run(output.sequences, [], session.cache, session, list(session.trace))
    if not run.cache.method.merges:
        with masked(model, run.trace):
            assert torch.equal(model.generate(**inputs, max_new_tokens=9, do_sample=False), run.tokens)
    widths = [[positions.shape[-1] for positions in step.values()] for step in run.trace[-3:]]
    assert widths[0] == widths[1] == widths[2]
    matrix.check_storage(run)


# ----------------------------------------------------------------------------------------------- operations by hand


def start(model: Any, inputs: dict[str, Any]) -> Any:
    return matrix.cache_of(model(**inputs, use_cache=True))


@pytest.mark.parametrize("name", matrix.METHODS)
def test_repeating_and_selecting_sequences(name: str) -> None:
    model, argument = matrix.model("llava", torch.float64), matrix.cache_argument("llava")
    inputs = unmasked(families.prompt("llava", dtype=torch.float64))
    with foveakv.compress(model, matrix.method(name)):
        cache = start(model, inputs)
        want = [model(input_ids=torch.tensor([[t]]), **{argument: cache}).logits for t in (11, 12, 13, 14)]
        cache = start(model, inputs)
        cache.batch_repeat_interleave(3)
        got = [model(input_ids=torch.full((3, 1), t), **{argument: cache}).logits[1:2] for t in (11, 12)]
        cache.batch_select_indices(torch.tensor([2]))
        got += [model(input_ids=torch.tensor([[t]]), **{argument: cache}).logits for t in (13, 14)]
    assert largest_difference(got, want) < 1e-9


@pytest.mark.parametrize("name", [name for name in matrix.METHODS if name not in ("hae", "h2o", "streaming")])
def test_cropping(name: str) -> None:
    model, argument = matrix.model("llava", torch.float64), matrix.cache_argument("llava")
    inputs = unmasked(families.prompt("llava", dtype=torch.float64))
    answers = []
    with foveakv.compress(model, matrix.method(name)):
        for draft in ([], [77, 78, 79]):
            cache = start(model, inputs)
            model(input_ids=torch.tensor([[11]]), **{argument: cache})
            if draft:
                model(input_ids=torch.tensor([draft]), **{argument: cache})
                cache.crop(-len(draft))
            answers.append(model(input_ids=torch.tensor([[12, 13]]), **{argument: cache}).logits)
    assert (answers[0] - answers[1]).abs().max() < 1e-9


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_in_pieces_by_hand(name: str) -> None:
    """`session.chunked_prefill(tokens)`: nothing is compressed before the whole prompt is in."""
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    ids = families.prompt("llama")["input_ids"]
    with foveakv.compress(model, matrix.method(name)) as session:
        want = [model(input_ids=ids, use_cache=True)]
        want.append(model(input_ids=torch.tensor([[11]]), **{argument: matrix.cache_of(want[0])}))
        kept = session.kept(2)
        pieces: dict[str, Any] = {}
        with session.chunked_prefill(ids.shape[1]):
            for piece in ids.split(13, 1):
                output = model(input_ids=piece, use_cache=True, **pieces)
                pieces = {argument: matrix.cache_of(output)}
        last = model(input_ids=torch.tensor([[11]]), **pieces)
        assert torch.equal(session.kept(2), kept)
    assert largest_difference([output.logits[:, -1:], last.logits], [w.logits[:, -1:] for w in want]) < 1e-6


def test_threads() -> None:
    model, inputs = matrix.model("llava", torch.float64), inputs_of("llava")
    want = matrix.compressed(model, matrix.method("hae"), inputs).tokens
    caches = [foveakv.cache_for(model, matrix.method("hae")) for _ in range(3)]

    def work(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.generate(**inputs, **matrix.GREEDY, past_key_values=cache).sequences

    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(tokens, want) for tokens in pool.map(work, caches))


# ----------------------------------------------------------------------------------------------- interleaved caches


@pytest.mark.parametrize("name", ["full", "hae", "snapkv"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_alternating_conversations_are_what_each_is_alone(family: str, name: str) -> None:
    """M-RoPE models keep an offset on themselves; a second conversation on one model must not disturb the first."""
    model = matrix.model(family, torch.float64)
    starts = [families.row(family, images=n, seed=n, text=12) for n in (2, 1, 0)]

    def begin(row: families.Row) -> dict[str, Any]:
        turn, cache = families.first_turn(family, [row], torch.float64), foveakv.cache_for(model, matrix.method(name))
        return {"turn": turn, "cache": cache, "logits": [], "turns": 0}

    def advance(talk: dict[str, Any]) -> None:
        with recorded(model) as logits:
            output = model.generate(**talk["turn"].inputs, **matrix.GREEDY, past_key_values=talk["cache"])
        talk["logits"] += [step[:, -1] for step in logits]
        talk["turns"] += 1
        image = talk["turns"] == 2
        talk["turn"] = families.next_turn(
            family, model, talk["turn"], output.sequences, image=image, seed=talk["turns"]
        )

    alone = [begin(row) for row in starts]
    for talk in alone:
        for _ in range(3):
            advance(talk)
    mixed = [begin(row) for row in starts]
    for turn in range(3):
        for talk in mixed if turn % 2 == 0 else mixed[::-1]:
            advance(talk)
    for a, b in zip(alone, mixed, strict=True):
        assert max((x - y).abs().max().item() for x, y in zip(a["logits"], b["logits"], strict=True)) < 1e-9


def by_hand(family: str, model: Any, cache: Any, inputs: dict[str, Any], chunks: list[list[int]]) -> Any:
    """A generator over the logits of a loop without position ids: the prompt, then each chunk of tokens."""
    argument = matrix.cache_argument(family)
    output = model(**inputs, **({argument: cache} if cache is not None else {}), use_cache=True)
    yield output.logits
    cache = matrix.cache_of(output)
    for chunk in chunks:
        output = model(input_ids=torch.tensor([chunk]), **{argument: cache})
        cache = matrix.cache_of(output)
        yield output.logits


CHUNKS = [[11], [12, 13, 14, 15], [16], [17, 18], [19]]


def unmasked(inputs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key != "attention_mask"}


@FAMILY_AND_METHOD
def test_loops_by_hand(family: str, name: str) -> None:
    """`model(...)` step by step, one and several tokens at a time, without position ids."""
    model = matrix.model(family, torch.float64)
    inputs = unmasked(families.prompt(family, dtype=torch.float64))
    with foveakv.compress(model, matrix.method(name), trace=True) as session:
        got = list(by_hand(family, model, None, inputs, CHUNKS))
        trace = list(session.trace)
        assert session.report.tokens_seen == inputs["input_ids"].shape[1] + sum(map(len, CHUNKS))
    with masked(model, trace):
        want = list(by_hand(family, model, None, inputs, CHUNKS))
    assert largest_difference(got, want, every_row=True) < 1e-6


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_interleaved_loops_by_hand(family: str) -> None:
    model = matrix.model(family, torch.float64)
    prompts = [unmasked(families.prompt(family, images=n, seed=n, dtype=torch.float64)) for n in (2, 1, 0)]

    def loop(prompt: dict[str, Any]) -> Any:
        return by_hand(family, model, foveakv.cache_for(model, matrix.method("snapkv")), prompt, CHUNKS)

    alone = [list(loop(prompt)) for prompt in prompts]
    mixed = list(zip(*[loop(prompt) for prompt in prompts], strict=True))  # one step of each in turn
    for number, logits in enumerate(alone):
        assert largest_difference([step[number] for step in mixed], logits, every_row=True) < 1e-9


def test_a_plain_cache_beside_a_compressed_one() -> None:
    """`cache_for` attaches to the model; other caches pass through it unchanged."""
    model = matrix.model("qwen2_5_vl", torch.float64)
    inputs = families.prompt("qwen2_5_vl", dtype=torch.float64)
    want = matrix.plain(model, inputs)
    cache = foveakv.cache_for(model, matrix.method("hae"))
    first = model.generate(**inputs, **matrix.GREEDY, past_key_values=cache)
    got = matrix.plain(model, inputs)
    assert type(got.cache) is transformers.DynamicCache
    assert largest_difference(got.logits, want.logits) < 1e-9
    turn = families.Turn(inputs, inputs, [families.row("qwen2_5_vl").pictures])
    turn = families.next_turn("qwen2_5_vl", model, turn, first.sequences)
    model.generate(**turn.inputs, **matrix.GREEDY, past_key_values=cache)
    got = matrix.plain(model, inputs, past_key_values=transformers.DynamicCache())
    assert largest_difference(got.logits, want.logits) < 1e-9


# --------------------------------------------------------------------------------- chunked prefill, embeddings, types


@pytest.mark.parametrize("chunk", [7, 16, 1000])
@pytest.mark.parametrize("name", [name for name in matrix.METHODS if name not in ("random", "fastv", "mustdrop")])
def test_chunked_prefill(name: str, chunk: int) -> None:
    model, inputs = matrix.model("llama", torch.float64), inputs_of("llama")
    whole = matrix.compressed(model, matrix.method(name), inputs)
    run = matrix.compressed(model, matrix.method(name), inputs, prefill_chunk_size=chunk)
    assert len(run.trace) == len(whole.trace) + -(-inputs["input_ids"].shape[1] // chunk) - 1
    for layer in run.cache.compressed:
        assert torch.equal(run.cache.kept(layer.layer_idx), whole.cache.kept(layer.layer_idx))
    steps = matrix.GREEDY["max_new_tokens"]
    assert largest_difference([step[:, -1:] for step in run.logits[-steps:]], whole.logits) < 1e-6


@pytest.mark.skipif(families.IMAGES_IN_CHUNKS, reason="this transformers keeps the images of a prefill in chunks")
def test_chunked_prefill_that_would_lose_images_is_refused() -> None:
    with pytest.raises(errors.UnsupportedModeError, match="loses pixel_values"):
        matrix.compressed(
            matrix.model("llava", torch.float64), matrix.method("snapkv"), inputs_of("llava"), prefill_chunk_size=16
        )


@families.images_in_chunks
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "gemma3"])
def test_chunked_prefill_with_images(family: str, name: str) -> None:
    model, inputs = matrix.model(family, torch.float64), inputs_of(family)
    run = matrix.compressed(model, matrix.method(name), inputs, prefill_chunk_size=16)
    if family == "gemma3":  # a chunk may cut through an image, whose tokens would see each other in one piece
        matrix.check_against_reference(model, run, inputs, prefill_chunk_size=16)
        return
    whole = matrix.compressed(model, matrix.method(name), inputs)
    for layer in run.cache.compressed:
        assert torch.equal(run.cache.kept(layer.layer_idx), whole.cache.kept(layer.layer_idx))
    steps = matrix.GREEDY["max_new_tokens"]
    assert largest_difference([step[:, -1:] for step in run.logits[-steps:]], whole.logits) < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_prompts_of_embeddings(name: str) -> None:
    model, inputs = matrix.model("llama", torch.float64), inputs_of("llama")
    embeddings = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]), "attention_mask": inputs["attention_mask"]
    }  # fmt: skip
    by_ids = matrix.compressed(model, matrix.method(name), inputs)
    run = matrix.compressed(model, matrix.method(name), embeddings)
    assert largest_difference(run.logits, by_ids.logits) < 1e-6


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.2), (torch.float16, 0.03)])
def test_half_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = matrix.model("qwen2_5_vl", dtype)
    inputs = families.batch("qwen2_5_vl", dtype=dtype).inputs
    run = matrix.compressed(model, matrix.method(name), inputs)
    assert all(step.isfinite().all() for step in run.logits)
    matrix.check_storage(run)
    matrix.check_against_reference(model, run, inputs, tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_eager_attention_underneath(name: str) -> None:
    model = families.build("llava")  # in fp64, transformers' eager attention turns a pad's row into NaN
    model.set_attn_implementation("eager")
    inputs = inputs_of("llava", torch.float32)
    run = matrix.compressed(model, matrix.method(name), inputs)
    assert model.config.text_config._attn_implementation == "eager"
    matrix.check_against_reference(model, run, inputs, tolerance=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_gradients_switched_on(name: str) -> None:
    """A loop by hand that forgot `torch.no_grad()` stores no autograd graph."""
    model = matrix.model("llama")
    with torch.enable_grad(), foveakv.compress(model, matrix.method(name)) as session:
        list(by_hand("llama", model, None, families.prompt("llama"), CHUNKS))
        tensors = [layer.segments.runs.keys for layer in session.cache.compressed]
    assert not any(keys.requires_grad for keys in tensors)


def test_videos() -> None:
    for family in ("qwen2_vl", "qwen2_5_vl"):
        model = matrix.model(family, torch.float64)
        inputs = families.prompt(family, images=1, video=True, dtype=torch.float64)
        for name in METHODS:
            run = matrix.compressed(model, matrix.method(name), inputs)
            matrix.check_against_reference(model, run, inputs)


# ----------------------------------------------------------------------------------------------- assisted decoding


@pytest.mark.parametrize("name", ["full", "snapkv", "hybridkv", "adakv"])
@pytest.mark.parametrize("how", ["lookup", "same", "other"])
def test_assisted_decoding(name: str, how: str) -> None:
    """Drafts from the prompt, from a model that is always right, and from one that is always wrong."""
    model = matrix.model("llama", torch.float64)
    inputs = families.encode("llama", [families.Row((8,) * 6, seed=2)])
    inputs["input_ids"][:, 1:41] = inputs["input_ids"][:, 1:9].repeat(1, 5)
    options: dict[str, Any] = {"max_new_tokens": 10}
    if how == "lookup":
        options["prompt_lookup_num_tokens"] = 3
    else:
        options["assistant_model"] = copy.deepcopy(model) if how == "same" else families.build("llama", seed=9).double()
    run = matrix.compressed(model, matrix.method(name), inputs, **options)
    assert run.tokens.shape[1] == inputs["input_ids"].shape[1] + 10
    assert max(step.shape[1] for step in run.logits[1:]) > 1 or how == "lookup"
    matrix.check_against_reference(model, run, inputs, **options)
    unassisted = matrix.compressed(model, matrix.method(name), inputs, max_new_tokens=10)
    if name == "full":
        assert torch.equal(run.tokens, unassisted.tokens)
    if name != "hybridkv":  # drafts that come with the prompt take no part in what is kept of it
        columns = inputs["input_ids"].shape[1]
        for mine, theirs in zip(matrix.positions_held(run), matrix.positions_held(unassisted), strict=True):
            assert mine[(mine >= 0) & (mine < columns)].tolist() == theirs[(theirs >= 0) & (theirs < columns)].tolist()


def test_assisted_decoding_on_images() -> None:
    model = matrix.model("qwen2_5_vl", torch.float64)
    inputs = families.prompt("qwen2_5_vl", dtype=torch.float64)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 10}
    run = matrix.compressed(model, matrix.method("snapkv"), inputs, **options)
    matrix.check_against_reference(model, run, inputs, **options)


# ----------------------------------------------------------------------------------------------------- what is refused


def refused(name: str, match: str, family: str = "llama", **options: Any) -> None:
    """The call raises, and leaves a model that still works inside the same block and after it."""
    model, inputs = matrix.model(family), inputs_of(family, torch.float32)
    with foveakv.compress(model, matrix.method(name)):
        with pytest.raises(errors.UnsupportedModeError, match=match):
            model.generate(**inputs, max_new_tokens=4, **options)
        model.generate(**inputs, max_new_tokens=2)
    before = matrix.plain_batch(family)
    assert largest_difference(matrix.plain(model, inputs, follow=before).logits, before.logits) < 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_no_cache_to_compress(name: str) -> None:
    refused(name, "use_cache=False", use_cache=False)
    refused(name, "use_cache=False", generation_config=transformers.GenerationConfig(use_cache=False))
    model, inputs = matrix.model("llava"), families.prompt("llava")
    with foveakv.compress(model, matrix.method(name)):
        with pytest.raises(errors.UnsupportedModeError, match="use_cache=False"):
            model(**inputs, use_cache=False)
        model(**inputs)


@pytest.mark.parametrize("name", GROWING)
def test_assisted_decoding_with_eviction_while_decoding(name: str) -> None:
    refused(name, f"{name}.*(snapkv|without an assistant)", prompt_lookup_num_tokens=3)
    refused(name, f"{name}.*(snapkv|without an assistant)", assistant_model=families.build("llama", seed=9))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("contrastive", {"penalty_alpha": 0.6, "top_k": 4}),
        ("static", {"cache_implementation": "static"}),
        ("quantized", {"cache_implementation": "quantized"}),
        ("offloaded", {"cache_implementation": "offloaded"}),
        ("custom_generate", {"custom_generate": "someone/something"}),
        ("output_attentions", {"output_attentions": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_modes_that_do_not_go_together_with_compression(name: str, match: str, options: dict[str, Any]) -> None:
    refused(name, match, **options)


def test_somebody_elses_filled_cache() -> None:
    model, inputs = matrix.model("llama"), families.prompt("llama")
    filled = matrix.plain(model, inputs).cache
    ids = torch.cat([inputs["input_ids"], torch.full((1, 8), 50)], 1)
    with (
        foveakv.compress(model, matrix.method("snapkv")),
        pytest.raises(errors.UnsupportedModeError, match="DynamicCache"),
    ):
        model.generate(input_ids=ids, past_key_values=filled, max_new_tokens=2)
    static = transformers.StaticCache(config=model.config, max_cache_len=100)
    with (
        foveakv.compress(model, matrix.method("snapkv")),
        pytest.raises(errors.UnsupportedModeError, match="StaticCache"),
    ):
        model.generate(**inputs, past_key_values=static, max_new_tokens=2)


@pytest.mark.parametrize("how", ["generate", "by hand"])
def test_an_empty_cache_of_ones_own_is_not_lost_silently(how: str) -> None:
    """A user's own DynamicCache either ends up holding the context or is refused: a second turn would start anew."""
    model, inputs = matrix.model("llama"), families.prompt("llama")
    mine = transformers.DynamicCache()
    with foveakv.compress(model, matrix.method("snapkv")):
        try:
            if how == "generate":
                model.generate(**inputs, past_key_values=mine, max_new_tokens=2)
            else:
                model(**inputs, **{matrix.cache_argument("llama"): mine})
        except errors.UnsupportedModeError:
            return
    assert mine.get_seq_length() > 0


def test_continuing_with_another_number_of_sequences() -> None:
    model = matrix.model("llama")
    one, three = families.prompt("llama"), inputs_of("llama", torch.float32)
    with foveakv.compress(model, matrix.method("snapkv")):
        cache = matrix.cache_of(model.generate(**one, **matrix.GREEDY))
        with pytest.raises(errors.CacheInUseError, match="1 sequences"):
            model(input_ids=three["input_ids"][:, -2:], **{matrix.cache_argument("llama"): cache})


@pytest.mark.parametrize("name", ["hae", "h2o", "streaming"])
def test_a_cache_that_evicts_while_decoding_cannot_be_cropped(name: str) -> None:
    model = matrix.model("llama")
    run = matrix.compressed(model, matrix.method(name), families.prompt("llama"))
    assert not run.cache.is_croppable
    with pytest.raises(errors.UnsupportedModeError, match=name):
        run.cache.crop(-1)


# ----------------------------------------------------------------------------- operations that change nothing or all


def test_an_incomplete_prompt_is_neither_cropped_nor_reordered() -> None:
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    ids = families.prompt("llama")["input_ids"]
    with foveakv.compress(model, matrix.method("snapkv")) as session, session.chunked_prefill(ids.shape[1]):
        cache = matrix.cache_of(model(input_ids=ids[:, :20], use_cache=True))
        for change in (lambda: cache.crop(-3), lambda: cache.reorder_cache(torch.tensor([0]))):
            with pytest.raises(errors.CacheInUseError, match="not complete"):
                change()
        waiting = sum(layer._queries.nbytes for layer in cache.compressed)
        assert waiting > 0
        assert cache.stored_nbytes >= waiting  # what waits for the rest of the prompt is memory too
        model(input_ids=ids[:, 20:], **{argument: cache})
        assert cache.prefilled


def test_a_refused_crop_changes_no_layer() -> None:
    model, inputs = matrix.model("gemma3", torch.float64), inputs_of("gemma3")  # sliding layers crop first
    run = matrix.compressed(model, matrix.method("h2o"), inputs)
    lengths = [layer.get_seq_length() for layer in run.cache.layers]
    with pytest.raises(errors.UnsupportedModeError, match="evicts while decoding"):
        run.cache.crop(-1)
    assert [layer.get_seq_length() for layer in run.cache.layers] == lengths


def test_a_bound_on_decoded_tokens_cannot_take_drafts_back() -> None:
    model, inputs = matrix.model("llama", torch.float64), inputs_of("llama")
    with foveakv.compress(model, matrix.method("snapkv"), max_decode_slots=4) as session:
        model.generate(**inputs, **matrix.GREEDY)
        with pytest.raises(errors.UnsupportedModeError, match="max_decode_slots evicts"):
            session.cache.crop(-1)


def test_a_copy_made_under_inference_mode_goes_on_outside() -> None:
    model, argument = matrix.model("llama", torch.float64), matrix.cache_argument("llama")
    ids = families.prompt("llama")["input_ids"]
    cache = foveakv.cache_for(model, matrix.method("h2o"))
    with torch.inference_mode():
        model(input_ids=ids, **{argument: cache})
        twin = copy.deepcopy(cache)
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([[11]]), **{argument: c}).logits for c in (twin, cache)]
    assert torch.equal(*logits)
