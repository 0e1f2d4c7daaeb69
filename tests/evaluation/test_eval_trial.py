"""Evaluation of one item: prefills that are read once, replies, agreement with the full cache, grades."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import families
import matrix
import numpy as np
import pytest
import second_passes
import tiny_folder
import torch

from foveakv.errors import InputError, UnsupportedModeError
from foveakv.evaluation import tasks
from foveakv.evaluation.agreement import Agreement, add
from foveakv.evaluation.bundle import fits
from foveakv.evaluation.cards import (
    CHARACTERS,
    TILE,
    chart_column,
    chart_style,
    digit_card,
    glyphs,
    photograph,
    print_glyphs,
)
from foveakv.evaluation.compare import Candidate, candidates
from foveakv.evaluation.decoding import GreedyDecoder
from foveakv.evaluation.grading import grade
from foveakv.evaluation.items import Item, Turn
from foveakv.evaluation.replay import read, record, replay
from foveakv.evaluation.results import Result
from foveakv.evaluation.trial import Bench, _drawn, _Prompt
from foveakv.methods import Method, Observes
from foveakv.methods.hae import HAE
from foveakv.models.loading import Loaded

REPLAYED = ["qwen2_5_vl", "llava", "llama"]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return Loaded(families.build("llava", dtype=torch.float64), tiny_folder.processor())


@pytest.fixture(scope="module")
def item() -> Item:
    turns = (Turn("<image><image> what is it?", ("a", "b"), max_new_tokens=6), Turn("and?", ("c",), max_new_tokens=5))
    return Item("two", 0, 0, (tiny_folder.picture(1), tiny_folder.picture(2)), turns, long=True)


@pytest.mark.parametrize("family", REPLAYED)
@pytest.mark.parametrize("name", [name for name in matrix.METHODS if not second_passes.in_one_pass(name)])
def test_replayed_prefill_equals_a_real_one(family: str, name: str) -> None:
    if family == "llama" and matrix.method(name).visual_only:
        pytest.skip("a text model has no visual tokens")
    model = matrix.model(family)
    inputs = families.prompt(family)
    decoder = GreedyDecoder(model, tiny_folder.tokenizer())
    recording = record(model, inputs)
    replayed = replay(recording, matrix.method(name))
    cache, logits = read(model, inputs, matrix.method(name))
    assert torch.equal(logits, recording.logits)
    (ours, ours_from) = decoder.reply_all([replayed], [recording.logits], 5)
    (theirs, theirs_from) = decoder.reply_all([cache], [logits], 5)
    assert ours == theirs
    assert torch.equal(torch.stack(ours_from[0]), torch.stack(theirs_from[0]))
    for layer in cache.compressed:
        assert torch.equal(replayed.kept(layer.layer_idx), cache.kept(layer.layer_idx))
        assert replayed.layers[layer.layer_idx].device_nbytes == layer.device_nbytes


@pytest.mark.parametrize("family", REPLAYED)
def test_replies_are_those_of_generate(family: str) -> None:
    model, inputs = matrix.model(family, torch.float64), families.prompt(family, dtype=torch.float64)
    recording = record(model, inputs)
    cache = replay(recording, matrix.method("full"))
    ((reply,), _) = GreedyDecoder(model, tiny_folder.tokenizer()).reply_all([cache], [recording.logits], 6)
    output = matrix.plain(model, inputs, suppress_tokens=[])  # the tests' models usually suppress special ones
    assert reply == output.tokens[0, inputs["input_ids"].shape[1] :].tolist()[: len(reply)]


@dataclass
class Scribbles(Method):
    """Overwrites what it is shown."""

    name: ClassVar[str] = "scribbles"

    @property
    def observes(self) -> Observes:
        return Observes(queries="all")

    def prefill(self, view: Any) -> None:
        for tensor in (view.query, view.keys, view.values, view.prompt.kinds, view.prompt.index):
            tensor.zero_()


@pytest.mark.parametrize("family", REPLAYED)
def test_no_method_changes_what_the_next_one_gets(family: str) -> None:
    model, inputs = matrix.model(family), families.prompt(family)
    recording, untouched = record(model, inputs), record(model, inputs)
    replay(recording, Scribbles())
    for layer, expected in zip(recording.layers, untouched.layers, strict=True):
        assert all(torch.equal(tensor, other) for tensor, other in zip(layer[:3], expected[:3], strict=True))
    assert torch.equal(recording.prompt.kinds, untouched.prompt.kinds)
    assert torch.equal(recording.prompt.index, untouched.prompt.index)


def test_what_cannot_be_replayed_is_refused() -> None:
    model = matrix.model("llava")
    inputs = families.prompt("llava")
    with pytest.raises(UnsupportedModeError, match="hae changes the prefill"):
        replay(record(model, inputs), HAE(drop_hidden_states=True))
    with pytest.raises(UnsupportedModeError, match="every layer"):
        record(matrix.model("gemma3"), families.prompt("gemma3"))


def test_full_agrees_with_itself_and_random_does_not(loaded: Loaded, item: Item) -> None:
    chosen = candidates(["full", "snapkv", "random"], [0.2], {"snapkv": {"window": 4}})
    full, snapkv, random = Bench(loaded).run(item, chosen)
    assert (full.match, full.kl) == (1.0, 0.0)
    assert full.scored == sum(turn.tokens for turn in full.turns) - 1
    assert [result.label for result in (full, snapkv, random)] == [candidate.label for candidate in chosen]
    assert snapkv.error is None
    assert (snapkv.kl or 0) > 0
    assert (snapkv.stored_bytes or 0) < (full.stored_bytes or 0)
    assert "static_heads" not in (snapkv.details or {})
    assert random.budget == 0.2
    assert (random.kl or 0) > 0
    assert Result.from_dict(snapkv.to_dict()) == snapkv


def test_replies_after_the_full_ones_are_fed(loaded: Loaded, item: Item) -> None:
    """The divergence over the full cache's replies equals that of a run forced through them by hand."""
    bench = Bench(loaded)
    full, result = bench.run(item, candidates(["full", "snapkv"], [0.2], {"snapkv": {"window": 4}}))
    decoder, recording = bench.decoder, record(loaded.model, _inputs(loaded, item))
    expected: list[float] = []
    caches = [
        replay(recording, matrix.method("full")),
        replay(recording, candidates(["snapkv"], [0.2], {"snapkv": {"window": 4}})[0].method),
    ]
    logits = [recording.logits.double()] * 2
    for number, turn in enumerate(item.turns):
        last = 0
        for step in range(full.turns[number].tokens):
            if number or step:
                expected.append(_divergence(*logits))
            last = int(logits[0].argmax())
            if step + 1 < full.turns[number].tokens:
                logits = [decoder.feed(cache, [last])[-1].double() for cache in caches]
        if number + 1 < len(item.turns):
            more = decoder.follow_up(item.turns[number + 1].text, last)
            logits = [decoder.feed(cache, more)[-1].double() for cache in caches]
        assert turn.max_new_tokens >= full.turns[number].tokens
    assert result.kl == pytest.approx(sum(expected) / len(expected), rel=1e-4)  # float32
    assert result.scored == len(expected)


def _inputs(loaded: Loaded, item: Item) -> dict[str, Any]:
    from foveakv.models.inputs import build_inputs

    return build_inputs(loaded.processor, item.turns[0].text, item.images, model=loaded.model)


def _divergence(full: torch.Tensor, method: torch.Tensor) -> float:
    p = full.softmax(-1)
    return float((p * (full.log_softmax(-1) - method.log_softmax(-1))).sum())


def test_likelihood_of_a_reply_is_the_full_caches(loaded: Loaded, item: Item) -> None:
    bench = Bench(loaded)
    full, result = bench.run(item, candidates(["full", "random"], [0.2]))
    cache, logits = read(loaded.model, _inputs(loaded, item), matrix.method("full"))
    (reply,), (said,) = bench.decoder.reply_all([cache], [logits], 6)
    chosen = torch.tensor(reply)[:, None]
    expected = float(torch.stack(said).log_softmax(-1).gather(-1, chosen).mean())
    assert full.log_likelihood == pytest.approx(expected, rel=1e-6)
    assert result.log_likelihood is not None
    assert result.log_likelihood <= 0


@dataclass
class Fails(Method):
    """Raises something that is not one of the project's errors."""

    name: ClassVar[str] = "fails"

    def prefill(self, view: Any) -> None:
        raise ZeroDivisionError("a bug")


@dataclass
class Spoils(Method):
    """Stores values that are no numbers."""

    name: ClassVar[str] = "spoils"

    def prefill(self, view: Any) -> None:
        view.values.fill_(torch.nan)


def test_logits_that_are_no_numbers_are_an_error(loaded: Loaded, item: Item) -> None:
    first, second = Bench(loaded).run(item, [Candidate("spoils", Spoils()), *candidates(["full"])])
    assert first.score is None
    assert "the logits contain NaN or infinity" in (first.error or "")
    assert second.error is None


def test_random_tokens_are_others_for_every_item(loaded: Loaded, item: Item) -> None:
    """Else one lucky draw would be in all items, and in no interval."""
    method = candidates(["random"], [0.2])[0].method
    draws = [_drawn(method, Item(task, n, 0, (), ())) for task, n in (("a", 0), ("a", 1), ("b", 0), ("a", 0))]
    assert draws[0] == draws[3]
    assert len({each.seed for each in draws}) == 3
    assert _drawn(replace(method, seed=1), item) != _drawn(method, item)
    (result,) = Bench(loaded).run(item, [Candidate("random", method)])
    assert result.settings["seed"] == 0


def test_an_error_of_one_method_stops_no_other(loaded: Loaded, item: Item) -> None:
    first, second = Bench(loaded).run(item, [Candidate("fails", Fails()), *candidates(["full"])])
    assert re.fullmatch(r"ZeroDivisionError: a bug \(test_eval_trial.py, line \d+\)", first.error or "")
    assert first.score is None
    assert second.error is None


def test_an_item_that_cannot_be_read_fails_for_every_method(loaded: Loaded, item: Item) -> None:
    broken = Item("two", 1, 0, item.images[:1], item.turns)
    results = list(Bench(loaded).run(broken, candidates(["full", "random"], [0.2])))
    assert [result.error is not None and "2 <image> marks" in result.error for result in results] == [True, True]


def test_chat_templates_carry_later_turns() -> None:
    decoder = GreedyDecoder(families.build("llava"), tiny_folder.processor(chat=True))
    text = decoder.tokenizer.decode(decoder.follow_up("and?", families.EOS))
    assert text.startswith("</s>")
    assert text.endswith("user: and?\nassistant: ")
    cut = decoder.follow_up("and?", families.TEXT_IDS[5])
    assert cut[:2] == [families.TEXT_IDS[5], families.EOS]


def test_agreement_by_hand() -> None:
    uniform = torch.zeros(2)
    sure = torch.tensor([math.log(3.0), 0.0])  # 3/4, 1/4
    one, other = Agreement(), Agreement()
    add([one, other], sure, [sure, -sure])
    add([one], sure, [-sure])
    assert (one.match, one.equal, one.scored, one.differs) == (0.5, 0.5, 2, True)
    assert one.kl == pytest.approx((0.75 * math.log(3) + 0.25 * math.log(1 / 3)) / 2)
    assert (other.match, other.equal, other.scored) == (0.0, 0.0, 1)
    add([other], sure, [sure])
    assert (other.match, other.equal) == (0.0, 0.5)
    none = Agreement()
    assert (none.match, none.equal, none.kl, none.scored, none.differs) == (1.0, 1.0, None, 0, False)
    half = Agreement()
    add([half], uniform, [sure])
    assert half.kl == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))


@pytest.mark.parametrize("family", REPLAYED)
def test_methods_side_by_side_say_what_each_says_alone(family: str) -> None:
    model = matrix.model(family, torch.float64)
    decoder, recording = GreedyDecoder(model, tiny_folder.tokenizer()), record(model, families.prompt(family))
    names = [name for name in matrix.METHODS if not second_passes.in_one_pass(name)]
    names = [name for name in names if family != "llama" or not matrix.method(name).visual_only]
    together = [replay(recording, matrix.method(name)) for name in names]
    replies, said = decoder.reply_all(together, [recording.logits] * len(names), 5)
    more = [[reply[-1], families.TEXT_IDS[3], families.TEXT_IDS[4]] for reply in replies]
    behind = decoder.feed_all(together, more)
    for place, name in enumerate(names):
        cache = replay(recording, matrix.method(name))
        (reply,), (own,) = decoder.reply_all([cache], [recording.logits], 5)
        assert reply == replies[place]
        torch.testing.assert_close(torch.stack(own), torch.stack(said[place]), rtol=0, atol=1e-5)
        torch.testing.assert_close(decoder.feed(cache, more[place]), behind[place], rtol=0, atol=1e-5)
        for layer in cache.compressed:
            assert torch.equal(together[place].kept(layer.layer_idx), cache.kept(layer.layer_idx))
            assert together[place].layers[layer.layer_idx].device_nbytes == layer.device_nbytes


def test_models_with_offsets_per_prompt_or_other_layers_run_alone() -> None:
    cache, _ = read(matrix.model("gemma3"), families.prompt("gemma3"), matrix.method("full"))
    assert not fits(cache)
    model = matrix.model("qwen2_5_vl")
    assert not fits(replay(record(model, families.prompt("qwen2_5_vl")), matrix.method("full")))
    model = matrix.model("llava")
    assert fits(replay(record(model, families.prompt("llava")), matrix.method("full")))


def test_times_are_measured_in_turns(loaded: Loaded, item: Item, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whatever is measured while the machine is idle looks fast beside the full cache."""
    fed: list[str] = []
    bench = Bench(loaded)
    feed = bench.decoder.feed

    def noted(cache: Any, tokens: Any) -> torch.Tensor:
        fed.append(cache.method.name)
        return feed(cache, tokens)

    prompt = _Prompt(bench, item)
    monkeypatch.setattr(bench.decoder, "feed", noted)
    chosen = [matrix.method(name) for name in ("full", "snapkv", "random")]
    times = prompt.token_seconds(chosen, [5, 6, 7])
    assert fed == ["full", "snapkv", "random"] * 2
    assert all((seconds or 0) > 0 for seconds in times)


def test_times_are_measured_on_some_items(loaded: Loaded, item: Item) -> None:
    chosen = candidates(["full", "random"], [0.2])
    (alone,) = Bench(loaded).run(item, chosen[1:])  # as when a plan grows: the full cache is timed beside it
    assert alone.token_seconds
    assert alone.full_token_seconds
    first, other = item, Item("two", 1, 0, item.images, item.turns)
    assert all((result.token_seconds or 0) > 0 for result in Bench(loaded).run(first, chosen))
    assert all(result.token_seconds is None for result in Bench(loaded).run(other, chosen))
    assert all(result.token_seconds is None for result in Bench(loaded, time_every=0).run(first, chosen))


def test_who_changes_the_prefill_is_judged_by_the_first_token_too(loaded: Loaded, item: Item) -> None:
    chosen = [Candidate(str(drop), matrix.method("hae", drop_hidden_states=drop)) for drop in (False, True)]
    full, plain, dropped = Bench(loaded).run(item, [*candidates(["full"]), *chosen])
    assert (plain.error, dropped.error) == (None, None)
    assert plain.scored == full.scored == dropped.scored - 1


def test_grades_by_hand() -> None:
    told = Turn("?", ("Ann's card: 3", "Bob's card: 4"))
    assert grade(told, "Bob's card: 4; Ann's card: 3") == 1.0
    assert grade(told, "Ann's card: 3; Bob's card: 5\nBob's card: 4") == 0.5
    assert grade(told, "") == 0.0
    listed = Turn("?", ("1", "2", "2", "4"), ", ", ordered=True)
    assert grade(listed, "1, 2, 4, 4") == 0.75
    assert grade(listed, "2, 2, 4") == 0.25
    single = Turn("?", ("Ann's card: 3",))
    assert grade(single, "Ann's card: 3; Bob's card: 5") == 1.0
    assert grade(single, "Ann's card: 2; Ann's card: 3") == 0.0
    twice = Turn("?", ("1", "1"), ", ")
    assert grade(twice, "1, 2") == 0.5


def test_items_are_made_again_by_number_and_seed() -> None:
    for name in tasks.available():
        task = tasks.find(name)
        one, again, other, seeded = task.item(3), task.item(3), task.item(4), task.item(3, seed=1)
        assert one.turns == again.turns
        assert all(np.array_equal(a, b) for a, b in zip(one.images, again.images, strict=True))
        assert one.turns != other.turns
        assert one.turns != seeded.turns
        assert one.turns[0].text.count("<image>") == len(one.images)
        assert all(grade(turn, turn.answer) == 1.0 for turn in one.turns)


def test_names_of_tasks_and_suites() -> None:
    assert set(tasks.suite("offline")) <= set(tasks.available())
    assert set(tasks.suite("validation")) <= set(tasks.available())
    with pytest.raises(InputError, match="unknown task 'chess'"):
        tasks.find("chess")
    with pytest.raises(InputError, match="unknown suite"):
        tasks.suite("online")


def test_handwriting_of_the_splits_differs() -> None:
    test, validation = glyphs("test"), glyphs("validation")
    assert test.shape == validation.shape == (10, 50, 20, 20)
    seen = {glyph.tobytes() for glyph in validation.reshape(-1, 400)}
    assert not any(glyph.tobytes() in seen for glyph in test.reshape(-1, 400))
    card = digit_card(np.random.default_rng(0), 7)
    assert card.size == (112, 112)
    assert np.asarray(card).std() > 5


def test_print_and_photographs_of_the_splits_differ() -> None:
    test, validation = print_glyphs("test"), print_glyphs("validation")
    assert test.shape == validation.shape == (len(CHARACTERS), 8, TILE, TILE)
    assert all(shape.max() > 200 for sheet in (test, validation) for shape in sheet.reshape(-1, TILE, TILE))
    assert not any(np.array_equal(a, b) for a in test[0] for b in validation[0])
    one, other = (np.asarray(photograph(np.random.default_rng(3), split)) for split in ("test", "validation"))
    assert one.shape == other.shape == (112, 112, 3)
    assert not np.array_equal(one, other)


def test_a_higher_value_has_a_higher_bar() -> None:
    style = dataclasses.replace(chart_style(np.random.default_rng(0)), lines=0, bar_colour=np.array([1.0, 0.0, 0.0]))
    columns = [np.asarray(chart_column(value, style, print_glyphs("test"))) for value in range(10)]
    bars = [int((column == [255, 0, 0]).all(-1).sum()) for column in columns]
    assert bars == sorted(set(bars))


def test_photographs_are_never_asked_for() -> None:
    for number in range(20):
        item = tasks.find("photos").item(number)
        assert len(item.images) == 16
        assert item.turns[0].facts[0][-1].isdigit()
