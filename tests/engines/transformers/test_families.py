"""Every method on every family, against the plain model and against the masked reference."""

from __future__ import annotations

import families
import matrix
import pytest
import second_passes
import torch
from masked_reference import largest_difference, recorded

import foveakv
from foveakv import errors
from foveakv.engines.transformers.families import FAMILIES as TABLE
from foveakv.engines.transformers.families import TESTED_DECODERS

FEW = ["qwen2_5_vl", "llava", "gemma3"]
PAIRS = [(family, method) for family in families.PLAIN for method in matrix.METHODS]


def needs_images(name: str, method: object) -> bool:
    return bool(method.visual_only) and families.FAMILIES[name].pixels is None  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------- the tiny models


@pytest.mark.parametrize("name", families.PLAIN)
def test_a_row_of_a_batch_equals_the_row_alone(name: str) -> None:
    """Without compression; otherwise nothing below could tell padding mistakes apart."""
    model = matrix.model(name, torch.float64)
    batch = families.batch(name, dtype=torch.float64)
    assert len({tuple(single["input_ids"].shape) for single in batch.singles}) > 1
    together = matrix.plain(model, batch.inputs)
    for b, single in enumerate(batch.singles):
        alone = matrix.plain(model, single)
        for step, logits in enumerate(alone.logits):
            assert (together.logits[step][b, -1] - logits[0, -1]).abs().max() < families.exactness(name)


@pytest.mark.parametrize("name", families.PLAIN)
def test_turns_of_the_plain_model_equal_one_long_prompt(name: str) -> None:
    """The inputs of `next_turn` are right: continuing a cache is the same as reading the conversation afresh."""
    model = matrix.model(name, torch.float64)
    visual = families.FAMILIES[name].pixels is not None
    turn = families.first_turn(name, [families.row(name), families.row(name, seed=1, text=7)], torch.float64)
    run = matrix.plain(model, turn.inputs, max_new_tokens=3)
    for step, image in enumerate([False, visual, False]):
        if name == "gemma3" and image and not families.accepts(name, "cache"):
            pytest.skip("transformers before 5.24 puts Gemma 3's image blocks at the wrong place in a later turn")
        turn = families.next_turn(name, model, turn, run.tokens, image=image, seed=step)
        run = matrix.plain(model, turn.inputs, past_key_values=run.cache, max_new_tokens=3)
        with recorded(model) as fresh:
            model.generate(**turn.fresh, max_new_tokens=3, do_sample=False)
        run.logits[0], fresh[0] = run.logits[0][:, -1:], fresh[0][:, -1:]
        assert largest_difference(run.logits, fresh) < families.exactness(name)


# ------------------------------------------------------------------------------------------------------ the matrix


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_method_on_family(family: str, name: str) -> None:
    """Nothing evicted: the plain model. Something evicted: the masked reference, in a left-padded batch."""
    everything, evicting = matrix.keeps_everything(name), matrix.method(name)
    if needs_images(family, evicting):
        with pytest.raises(errors.NoVisualTokensError):
            matrix.compressed(matrix.model(family), evicting, families.batch(family).inputs)
        return
    if second_passes.refused(family, name):
        with pytest.raises(errors.UnsupportedModelError, match="second pass"):
            matrix.compressed(matrix.model(family), evicting, families.batch(family).inputs)
        return

    model = matrix.model(family)
    inputs = families.batch(family).inputs
    if everything is not None:
        plain = matrix.plain_batch(family)
        run = matrix.compressed(model, everything, inputs, follow=plain)
        tolerance = max(1e-5, families.exactness(family))
        assert largest_difference(run.logits, plain.logits) < tolerance
        matrix.check_choices(run, tolerance)
        assert run.session.report.evicted == 0

    model = matrix.model(family, torch.float64)
    batch = families.batch(family, dtype=torch.float64)
    run = matrix.compressed(model, evicting, batch.inputs)
    report = run.session.report
    if name != "full":
        assert report.evicted > 0 or report.retrieved > 0
        assert not any("nothing was evicted" in note for note in report.notes)
    matrix.check_against_reference(model, run, batch.inputs, families.exactness(family))
    matrix.check_storage(run)
    for held in matrix.positions_held(run):
        for b, pads in enumerate(batch.pads):
            real = held[b][held[b] >= 0]
            assert int(real.min()) >= pads, "a pad is kept"
            assert int(real.max()) < run.cache.seen


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize(("name", "options"), matrix.VARIANTS, ids=lambda value: str(value))
def test_options_against_the_reference(family: str, name: str, options: dict[str, object]) -> None:
    model = matrix.model(family, torch.float64)
    inputs = families.batch(family, dtype=torch.float64).inputs
    run = matrix.compressed(model, matrix.method(name, **options), inputs)
    assert run.session.report.evicted > 0 or run.session.report.retrieved > 0
    matrix.check_against_reference(model, run, inputs)
    matrix.check_storage(run)


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("name", matrix.METHODS)
def test_a_compressed_row_of_a_batch_equals_the_row_alone(family: str, name: str) -> None:
    """Padding and neighbours have no influence on what a row keeps (budgets are shares of each row's own prompt)."""
    if second_passes.refused(family, name):
        pytest.skip("refused, see test_method_on_family")
    model = matrix.model(family, torch.float64)
    batch = families.batch(family, dtype=torch.float64)
    together = matrix.compressed(model, matrix.method(name), batch.inputs)
    held = matrix.positions_held(together)
    for b, (single, pads) in enumerate(zip(batch.singles, batch.pads, strict=True)):
        alone = matrix.compressed(model, matrix.method(name), single)
        for step, logits in enumerate(alone.logits):
            assert (together.logits[step][b, -1] - logits[0, -1]).abs().max() < 1e-6
        for layer, own in enumerate(matrix.positions_held(alone)):
            for head in range(own.shape[1]):
                theirs = held[layer][b, head]
                mine = own[0, head]
                assert sorted((theirs[theirs >= 0] - pads).tolist()) == sorted(mine[mine >= 0].tolist())


PICTURE = families.Picture()
ODD = {
    "one token": [families.Row(())],
    "two tokens": [families.Row((1,))],
    "image last": [families.Row((5, PICTURE))],
    "image first": [families.Row((PICTURE, 7))],
    "adjacent images": [families.Row((3, PICTURE, families.Picture(seed=5), 9))],
    "rows without an image": [families.Row((4, PICTURE, 9)), families.Row((30,), 1), families.Row((2,), 2)],
    "long and short": [families.Row((3, PICTURE, 40)), families.Row((1, families.Picture(seed=2), 1), 1)],
}


@pytest.mark.parametrize("name", matrix.METHODS)
def test_odd_prompts(name: str) -> None:
    """With default settings, and with a budget of one token per head where there is a budget."""
    model = matrix.model("llava", torch.float64)
    smallest = {"budget": 1} if "budget" in matrix.fields(name) and name != "hae" else {}
    for label, rows in ODD.items():
        inputs = families.encode("llava", rows, torch.float64)
        for method in (matrix.default(name), matrix.method(name, **smallest)):
            if method.visual_only and not any(row.pictures for row in rows):
                continue
            run = matrix.compressed(model, method, inputs, max_new_tokens=3)
            want = matrix.replayed(model, run, inputs, max_new_tokens=3)
            steps = matrix.comparable(run)
            assert largest_difference(run.logits[:steps], want.logits[:steps]) < 1e-6, (label, method)


DROPPING = [
    (name, options)
    for name, options in [
        ("hae", {"drop_hidden_states": True, "ddes": False, "budget": None}),
        ("hae", {"drop_hidden_states": True, "budget": None}),
        ("fastv", {"drop_hidden_states": True}),
    ]
    if name in matrix.METHODS
]


WHOLE_STREAM = ["qwen3_vl", "gemma3", "qwen3_5"]  # deepstack, sliding windows, linear attention


@pytest.mark.parametrize("family", [name for name in families.VISUAL if name not in WHOLE_STREAM])
@pytest.mark.parametrize(("name", "options"), DROPPING, ids=lambda value: str(value))
def test_tokens_that_leave_the_residual_stream(family: str, name: str, options: dict[str, object]) -> None:
    model = matrix.model(family, torch.float64)
    inputs = families.batch(family, dtype=torch.float64).inputs
    run = matrix.compressed(model, matrix.method(name, **options), inputs)
    assert run.session.report.evicted > 0
    matrix.check_against_reference(model, run, inputs, families.exactness(family))
    matrix.check_storage(run)


@pytest.mark.parametrize("family", WHOLE_STREAM)
def test_models_that_need_every_token_in_the_residual_stream(family: str) -> None:
    model = matrix.model(family)
    method = matrix.method("hae", drop_hidden_states=True)
    with pytest.raises(errors.UnsupportedModelError, match="drop_hidden_states=False"):
        foveakv.compress(model, method).__enter__()
    with pytest.raises(errors.UnsupportedModelError, match="drop_hidden_states=False"):
        foveakv.cache_for(model, method)
    assert model.model.language_model.config._attn_implementation == "sdpa"
    assert "generate" not in vars(model)


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("name", matrix.METHODS)
def test_stored_bytes_fall(name: str) -> None:
    """Entries are dropped, not masked: on a longer prompt the storage itself is smaller than the plain cache's."""
    model = matrix.model("internvl")
    inputs = families.prompt("internvl", images=10, text=6)
    plain = matrix.plain(model, inputs, max_new_tokens=4)
    options = {"fastv": {"ratio": 0.9}, "random": {"budget": 0.5}}.get(name, {})
    if not options and "budget" in matrix.fields(name):
        options = {"budget": 0.2}
    run = matrix.compressed(model, matrix.method(name, **options), inputs, max_new_tokens=4)
    report = run.session.report
    matrix.check_storage(run)
    assert report.full_bytes == sum(matrix.storage(plain.cache).values())
    assert report.full_slots == 4 * 2 * run.cache.seen
    assert report.stored_slots == sum(int((held >= 0).sum()) for held in matrix.positions_held(run))
    if name == "quest":
        assert report.evicted == 0
        assert report.retrieved > 0
    if name in ("full", "quest"):  # both keep everything
        assert report.stored_bytes >= report.full_bytes
    else:
        assert report.evicted + report.retrieved > 0
        assert report.stored_bytes < 0.85 * report.full_bytes
        assert report.compression > 1


# -------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", families.DOUBTFUL)
def test_unsupported_families_say_why(name: str) -> None:
    model = families.build(name)
    row = next(row for row in TABLE if row.model_type == model.config.model_type)
    before = model.get_decoder().config._attn_implementation
    with pytest.raises(errors.UnsupportedModelError, match=r"\w+ is not supported: \w+") as caught:
        foveakv.compress(model, foveakv.methods.get("full")).__enter__()
    assert row.reason in str(caught.value)
    with pytest.raises(errors.UnsupportedModelError):
        foveakv.cache_for(model, foveakv.methods.get("full"))
    assert model.get_decoder().config._attn_implementation == before
    assert "generate" not in vars(model)
    assert not model._forward_pre_hooks


def test_the_table_of_families_is_what_is_tested() -> None:
    supported = {row.model_type for row in TABLE if not row.reason}
    refused = {row.model_type for row in TABLE if row.reason}
    assert supported == {families.FAMILIES[name].config().model_type for name in families.PLAIN}
    assert refused == {families.FAMILIES[name].config().model_type for name in families.DOUBTFUL}


def test_decoders_that_need_no_probe_are_the_tested_ones() -> None:
    configs = [families.FAMILIES[name].config() for name in families.PLAIN]
    assert {config.get_text_config().model_type for config in configs} == TESTED_DECODERS


def test_a_model_without_a_decoder_is_refused() -> None:
    with pytest.raises(errors.UnsupportedModelError):
        foveakv.compress(torch.nn.Linear(2, 2), foveakv.methods.get("full")).__enter__()
