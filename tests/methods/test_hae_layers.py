"""HAE with a later deciding layer: what layers before it keep, shared scores, and where the layer comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import matrix
import pytest
import torch
from plain_views import Case, run
from torch import Tensor

import foveakv
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.fingerprint import digest_of
from foveakv.errors import MethodError
from foveakv.methods import calibration
from foveakv.methods.calibration import ScoreLayers
from foveakv.methods.dap import text_stats
from foveakv.methods.hae import HAE

FAMILY = "llava"
EARLY = pytest.mark.parametrize("early", ["wait", "first", "own"])
STAGES: dict[str, dict[str, Any]] = {
    "dap": {"ddes": False, "budget": None, "target_visual_tokens": 0.4},
    "both": {"budget": 0.6, "recycle_bin_size": 3, "target_visual_tokens": 0.4},
    "stream": {"ddes": False, "budget": None, "target_visual_tokens": 0.4, "drop_hidden_states": True},
    "stream-both": {"budget": 0.6, "recycle_bin_size": 3, "target_visual_tokens": 0.4, "drop_hidden_states": True},
}
stages = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture
def model() -> Any:
    return matrix.model(FAMILY, torch.float64)


@pytest.fixture(scope="module")
def batch() -> families.Batch:
    return families.batch(FAMILY, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEAKV_CACHE", str(tmp_path))


def method(stage: str, **options: Any) -> HAE:
    return HAE(**{"score_layer": 2, **STAGES[stage], **options})


# ----------------------------------------------------------------------------------------------------------- exactness


@EARLY
@stages
def test_logits_are_those_of_the_masked_model(model, batch, stage, early):
    """In a padded batch, and with beams."""
    for options in ({}, {"num_beams": 2}):
        got = matrix.compressed(model, method(stage, early_layers=early), batch.inputs, **options)
        assert got.session.report.evicted > 0
        matrix.check_against_reference(model, got, batch.inputs, **options)
    if stage == "both":
        assert got.cache.results.figures["evicted_decode"] > 0


@EARLY
@stages
def test_rows_of_a_batch_are_what_they_are_alone(model, batch, stage, early):
    chosen = method(stage, early_layers=early)
    got = matrix.compressed(model, chosen, batch.inputs)
    for b, single in enumerate(batch.singles):
        alone = matrix.compressed(model, chosen, single)
        assert alone.tokens[0, -6:].tolist() == got.tokens[b, -6:].tolist()
        for layer in range(4):
            held = got.session.kept(layer)[b, 0]
            assert (held[held >= 0] - batch.pads[b]).tolist() == alone.session.kept(layer)[0, 0].tolist()


@families.images_in_chunks
@EARLY
@pytest.mark.parametrize("options", [{}, {"scores": "shared"}])
def test_a_prompt_in_chunks_keeps_the_same(model, early, options):
    if options and early != "wait":
        pytest.skip("shared scores wait")
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    chosen = method("both", early_layers=early, **options)
    whole = matrix.compressed(model, chosen, inputs)
    chunks = matrix.compressed(model, chosen, inputs, prefill_chunk_size=20)
    assert torch.equal(whole.tokens, chunks.tokens)
    for a, b in zip(matrix.positions_held(whole), matrix.positions_held(chunks), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{}, {"scores": "shared"}, {"candidates": "prompt"}])
def test_a_second_turn(model, options):
    turn = families.first_turn(FAMILY, [families.row(FAMILY, 1)], torch.float64)
    chosen = method("both", **{"budget": 25, "recycle_bin_size": 4, **options})
    with foveakv.compress(model, chosen) as session:
        first = model.generate(**turn.inputs, **{**matrix.GREEDY, "max_new_tokens": 4})
        later = families.next_turn(FAMILY, model, turn, first.sequences)
        cache = session.cache
        model.generate(
            **later.inputs, **{compat.cache_argument(model): cache}, **{**matrix.GREEDY, "max_new_tokens": 9}
        )
        for layer in cache.compressed:
            lengths = layer.segments.lengths
            assert bool(((lengths >= 25) & (lengths < 29)).all())


def test_quantized_slots(model):
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    for stage in ("dap", "both"):
        chosen = method(stage)
        want = matrix.compressed(model, chosen, inputs, max_new_tokens=1)
        got = matrix.compressed(
            model, chosen, inputs, max_new_tokens=1, session_options={"kv_dtype": "int8", "trace": True}
        )
        for a, b in zip(matrix.positions_held(want), matrix.positions_held(got), strict=True):
            assert torch.equal(a, b)


# -------------------------------------------------------------------------------------------------- what layers keep


def held(got: matrix.Run) -> list[list[int]]:
    return [positions[0, 0].tolist() for positions in matrix.positions_held(got)]


@EARLY
def test_what_early_layers_keep(model, early):
    """By layer 0, by each layer itself, or by the deciding layer, as with single layers that decide."""
    inputs = families.prompt(FAMILY, dtype=torch.float64)

    def kept(layer: int, **options: Any) -> list[list[int]]:
        return held(matrix.compressed(model, method("dap", score_layer=layer, **options), inputs, max_new_tokens=1))

    got, alone = kept(2, early_layers=early), [kept(layer)[layer] for layer in range(3)]
    assert len({tuple(each) for each in alone}) == 3
    wanted = {"wait": [alone[2]] * 2, "first": [alone[0]] * 2, "own": alone[:2]}[early]
    assert got == [*wanted, alone[2], alone[2]]


@stages
def test_no_layer_is_before_the_first(model, stage):
    """With layer 0, as in the paper, `early_layers` makes no difference, and nothing waits."""
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    runs = [
        matrix.compressed(model, method(stage, score_layer=0, rows="sum", early_layers=early), inputs)
        for early in ("wait", "first", "own")
    ]
    for got in runs[1:]:
        assert held(got) == held(runs[0])
        assert got.cache.peak_nbytes == runs[0].cache.peak_nbytes
    matrix.check_against_reference(model, runs[0], inputs)


def test_the_papers_preset_in_a_model(model, batch):
    chosen = HAE.preset("paper", budget=25, recycle_bin_size=4, target_visual_tokens=0.4)
    got = matrix.compressed(model, chosen, batch.inputs, max_new_tokens=10)
    assert got.cache.results.figures["score_layers"] == [0]
    assert got.session.report.method_notes == ()
    assert got.cache.results.figures["evicted_decode"] > 0
    matrix.check_against_reference(model, got, batch.inputs, max_new_tokens=10)


def test_a_method_without_its_model_says_so():
    assert HAE(score_layer=1).needs_queries(1)
    with pytest.raises(MethodError, match="depends on the model; call for_model first"):
        HAE(ddes=False).needs_queries(1)


def test_several_layers_decide_by_their_mean(model):
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    kept = {
        layers: held(matrix.compressed(model, method("dap", score_layer=layers), inputs, max_new_tokens=1))
        for layers in (0, 1, 3, (0, 1, 3), "0,1,3", "3+0+1")
    }
    assert kept[0, 1, 3] == kept["0,1,3"] == kept["3+0+1"]
    assert kept[0, 1, 3][0] == kept[0, 1, 3][3]
    assert kept[0, 1, 3][0] not in (kept[0][0], kept[1][0], kept[3][0])


def test_waiting_is_counted_in_the_peak(model):
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    peaks = {
        (layer, early): matrix.compressed(
            model, method("dap", score_layer=layer, early_layers=early, target_visual_tokens=1), inputs
        ).cache.peak_nbytes
        for layer, early in [(0, "wait"), (2, "wait"), (3, "wait"), (3, "own")]
    }
    assert peaks[0, "wait"] < peaks[2, "wait"] < peaks[3, "wait"]
    assert peaks[3, "own"] < peaks[3, "wait"]


def test_text_does_not_wait(model):
    """Without visual tokens there is nothing to decide: each layer is reduced at once, whichever layer decides."""
    text = families.encode(FAMILY, [families.Row((40,))], torch.float64)
    runs = [
        matrix.compressed(model, method("both", budget=0.3, score_layer=layer, early_layers=early), text)
        for layer, early in [(0, "wait"), (3, "wait"), (3, "first"), (3, "own")]
    ]
    for got in runs:
        assert held(got) == held(runs[0])
        assert got.cache.peak_nbytes == runs[0].cache.peak_nbytes
    matrix.check_against_reference(model, runs[1], text)


def test_mean_rows_by_hand():
    """a_j, m_j and the variance over the text rows that can see column j, from the definition, with padding."""
    case = Case.of({1: 40, 2: 33})
    views: list[Any] = []

    class Watched(HAE):
        def prefill(self, view: Any) -> Any:
            views.append(view)
            return super().prefill(view)

    run(Watched(score_layer=0), case)
    view = views[0]
    found = {rows: text_stats(view, rows) for rows in ("mean", "sum")}
    for b in range(2):
        real, text = view.prompt.real[b], view.prompt.text[b]
        group = view.query.shape[1] // view.keys.shape[1]
        logits = view.query[b] @ view.keys[b].repeat_interleave(group, 0).mT * view.scaling
        sees = torch.ones(logits.shape[1:]).tril().bool() & real
        mean = logits.masked_fill(~sees, -torch.inf).softmax(-1).mean(0)
        for j in view.prompt.visual[b].nonzero()[:, 0].tolist():
            rows = [i for i in text.nonzero()[:, 0].tolist() if i >= j]
            column = mean[rows, j]
            assert found["sum"].sums[b, j] == pytest.approx(float(column.sum()))
            assert found["mean"].sums[b, j] == pytest.approx(float(column.mean()))
            assert found["mean"].maxima[b, j] == pytest.approx(float(column.max()))
            assert found["mean"].variance[b, j] == pytest.approx(float(column.var(correction=0)))


def test_one_image_makes_no_difference_between_mean_and_sum(model):
    """All text after a single image sees all of it."""
    inputs = families.encode(FAMILY, [families.Row((5, families.Picture(0, 1), 9))], torch.float64)
    kept = [
        held(matrix.compressed(model, method("dap", rows=rows), inputs, max_new_tokens=1)) for rows in ("mean", "sum")
    ]
    assert kept[0] == kept[1]


def test_value_norms_change_what_is_kept(model):
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    for stage in ("dap", "both"):
        plain, weighted = (
            held(matrix.compressed(model, method(stage, value_norm=norm), inputs, max_new_tokens=1))
            for norm in (False, True)
        )
        assert plain != weighted
        assert list(map(len, plain)) == list(map(len, weighted))


# ------------------------------------------------------------------------------------------------------- shared scores


@pytest.mark.parametrize("candidates", ["all", "prompt"])
@pytest.mark.parametrize("size", [1, 3])
def test_shared_scores_by_hand(size: int, candidates: str) -> None:
    """All layers hold one set of tokens; the set is that of a loop over sets, by the sums up to the step before."""
    chosen = HAE(
        budget=24, scores="shared", dap=False, score_layer=(1, 2), recycle_bin_size=size, candidates=candidates,
        recent=2, sink=1, value_norm=False,
    )  # fmt: skip
    case = Case.of({1: 40}, new=(1, 1, 2, 1, 1, 1, 4, 1, 1, 1, 1, 1))
    got = run(chosen, case)
    for step in got.attended:
        assert all(layer == step[0] for layer in step)
        assert all(head == row[0] for layer in step for row in layer for head in row)

    def attention(layer: int, query: Tensor, seen: list[int], new: int) -> Tensor:
        """What each seen token receives from the newest `new` ones, summed over query heads."""
        keys = torch.cat([case.layers[layer][1], *(step[layer][1] for step in case.steps)], 2)[0]
        total = torch.zeros(len(seen), dtype=keys.dtype)
        for q in range(new):
            last = max(seen) - new + 1 + q
            logits = (query[0, :, q, None] * keys.repeat_interleave(2, 0)[:, seen]).sum(-1) * 8**-0.5
            hidden = torch.tensor(seen) > last
            total += logits.masked_fill(hidden, -torch.inf).softmax(-1).sum(0)
        return total

    columns = list(range(40))
    scores = dict.fromkeys(columns, 0.0)
    for layer in (1, 2):
        for row in columns:
            query = case.layers[layer][0][:, :, row : row + 1]
            for column, value in zip(columns[: row + 1], attention(layer, query, columns[: row + 1], 1), strict=True):
                scores[column] += float(value) * 4 / 2
    middle = sorted(columns[1:-2], key=lambda c: -scores[c])[: 24 - 3]
    stored = sorted({0, 38, 39, *middle})
    assert got.attended[0][0][0][0] == stored
    seen, opened = 40, False
    for number, step in enumerate(case.steps):
        new = step[0][0].shape[2]
        stored += list(range(seen, seen + new))
        seen += new
        assert got.attended[number + 1][0][0][0] == stored
        evict = max(0, len(stored) - 24) // size * size
        free = stored[1 : len(stored) - max(2, new)]
        prompt = [token for token in free if token < 40]
        opened = opened or candidates == "all" or len(prompt) < evict
        scores |= dict.fromkeys(range(seen - new, seen), 0.0)
        victims = sorted(free if opened else prompt, key=lambda token: (scores[token], token))[:evict]
        for layer in range(4):
            for token, value in zip(stored, attention(layer, step[layer][0], stored, new), strict=True):
                scores[token] += float(value)
        stored = [token for token in stored if token not in victims]
    assert sorted(got.slots[0].positions()[0, 0].tolist()) == stored


def test_shared_scores_in_a_model(model, batch):
    chosen = method("both", scores="shared", budget=20)
    got = matrix.compressed(model, chosen, batch.inputs, max_new_tokens=12)
    for step in got.trace[1:]:
        for positions in step.values():
            assert torch.equal(positions, step[0][:, :1].expand_as(positions))
    assert got.cache.results.figures["evicted_decode"] > 0
    matrix.check_against_reference(model, got, batch.inputs, max_new_tokens=12)
    for b, single in enumerate(batch.singles):
        alone = matrix.compressed(model, chosen, single, max_new_tokens=12, follow=None)
        assert alone.tokens[0, -12:].tolist() == got.tokens[b, -12:].tolist()


@pytest.mark.parametrize(
    "options", [{"scores": "shared"}, {"scores": "shared", "candidates": "prompt"}, {"candidates": "prompt"}]
)
def test_beams_reorder_scores_and_candidates(model, batch, options):
    chosen = method("both", budget=20, **options)
    got = matrix.compressed(model, chosen, batch.inputs, num_beams=3, max_new_tokens=10)
    assert got.cache.results.figures["evicted_decode"] > 0
    matrix.check_against_reference(model, got, batch.inputs, num_beams=3, max_new_tokens=10)


# ------------------------------------------------------------------------------------------- where the layer comes from


def found(model: Any, **options: Any) -> tuple[list[int], tuple[str, ...]]:
    inputs = families.prompt(FAMILY, dtype=model.dtype)
    got = matrix.compressed(model, HAE(target_visual_tokens=3, **options), inputs, max_new_tokens=1)
    assert got.cache.method.describe()["score_layer"] == HAE(**options).describe()["score_layer"]
    return got.cache.results.figures["score_layers"], got.session.report.method_notes


def test_a_calibration_file_is_found(model):
    layers, notes = found(model)
    assert layers == [2]
    assert "rule of thumb" in notes[0]
    path = calibration.save(ScoreLayers("tiny", digest_of(model), (1, 3), 4, 0.15))
    layers, notes = found(model)
    assert layers == [1, 3]
    assert str(path) in notes[0]
    assert found(model, score_layer=str(path))[0] == [1, 3]
    path.write_text("{}")
    with pytest.raises(MethodError, match=f"{path.name}.*'model' is missing"):
        foveakv.cache_for(model, HAE())
    assert found(model, score_layer=1) == ([1], ())


def test_files_of_other_models(model, tmp_path):
    path = calibration.save(ScoreLayers("other", "a" * 64, (1,), 4, 0.15), tmp_path / "other.json")
    layers, notes = found(model, score_layer=str(path))
    assert layers == [1]
    assert "other weights" in notes[0]
    calibration.save(ScoreLayers("deep", "a" * 64, (9,), 30, 0.15), path)
    with pytest.raises(MethodError, match=r"compresses 30 layers; this one has 4"):
        foveakv.cache_for(model, HAE(score_layer=str(path)))
    with pytest.raises(MethodError, match="no calibration file"):
        foveakv.compress(model, HAE(score_layer="missing.json")).__enter__()


@pytest.mark.parametrize(("value", "layer"), [(0, 0), (3, 3), (0.0, 0), (0.5, 2), (0.74, 2), (1.0, 3), ("1", 1)])
def test_indices_and_shares(model, value, layer):
    assert found(model, score_layer=value)[0] == [layer]


def test_layers_that_the_model_does_not_have(model):
    with pytest.raises(MethodError, match="score_layer names layer 4; this model compresses 4, counted from 0 to 3"):
        foveakv.cache_for(model, HAE(score_layer=4))
    with pytest.raises(MethodError, match="the last layer has no later ones"):
        foveakv.cache_for(model, HAE(score_layer=3, drop_hidden_states=True))


@pytest.mark.parametrize("options", [{}, {"scores": "shared"}, {"early_layers": "own"}])
def test_layers_count_among_the_compressed_ones(options):
    """Every second layer of this model has a sliding window and is not compressed."""
    model, inputs = matrix.model("gemma3", torch.float64), families.prompt("gemma3", dtype=torch.float64)
    chosen = HAE(budget=0.6, recycle_bin_size=3, target_visual_tokens=0.4, **options)
    got = matrix.compressed(model, chosen, inputs)
    assert got.cache.results.figures["score_layers"] == [1]
    assert len(got.cache.compressed) == 2
    matrix.check_against_reference(model, got, inputs)
    with pytest.raises(MethodError, match="this model compresses 2"):
        foveakv.cache_for(model, HAE(score_layer=2))
