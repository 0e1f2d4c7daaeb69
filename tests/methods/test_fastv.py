from dataclasses import dataclass, field
from typing import Any

import families
import matrix
import pytest
import torch
from torch import Tensor

import foveakv
from foveakv.errors import MethodError, NoVisualTokensError
from foveakv.methods.fastv import FastV

FAMILY = "llava"


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return families.prompt(FAMILY, dtype=torch.float64)


@pytest.fixture(scope="module")
def batch() -> families.Batch:
    return families.batch(FAMILY, dtype=torch.float64)


@pytest.fixture
def model() -> Any:
    return matrix.model(FAMILY, torch.float64)


@dataclass
class Watched(FastV):
    """Keeps the queries and keys that every layer's prefill saw."""

    views: list[Any] = field(default_factory=list, init=False)

    def prefill(self, view: Any) -> Any:
        self.views.append((view.query.clone(), view.keys.clone(), view.scaling))
        return super().prefill(view)


@pytest.mark.parametrize(("layer", "ratio"), [(1, 0.25), (2, 0.5), (3, 1.0)])
def test_the_last_token_of_layer_k_chooses_for_later_layers(model, inputs, layer, ratio):
    method = Watched(layer=layer, ratio=ratio)
    run = matrix.compressed(model, method, inputs, max_new_tokens=2)
    query, keys, scaling = method.views[layer - 1]
    ids = inputs["input_ids"][0].tolist()
    score = torch.zeros(len(ids), dtype=torch.float64)
    for i in range(4):  # query heads; two read each KV head
        score += (keys[0, i // 2] @ query[0, i, -1] * scaling).softmax(-1) / 4
    visual = [c for c, token in enumerate(ids) if token == families.IMAGE]
    drop = set(sorted(visual, key=lambda c: float(score[c]))[: int(ratio * len(visual))])
    assert drop
    everything = list(range(len(ids) + 1))
    for number in range(4):
        expected = everything if number < layer else [c for c in everything if c not in drop]
        assert run.session.kept(number)[0].tolist() == [expected] * 2
    matrix.check_against_reference(model, run, inputs, 1e-9, max_new_tokens=2)


@pytest.mark.parametrize("drop_hidden_states", [False, True])
def test_rows_of_a_batch_are_what_they_are_alone(model, batch, drop_hidden_states):
    method = FastV(drop_hidden_states=drop_hidden_states)
    run = matrix.compressed(model, method, batch.inputs)
    for b, single in enumerate(batch.singles):
        alone = matrix.compressed(model, method, single)
        assert alone.tokens[0, -6:].tolist() == run.tokens[b, -6:].tolist()
        for layer in range(4):
            held = run.session.kept(layer)[b, 0]
            assert (held[held >= 0] - batch.pads[b]).tolist() == alone.session.kept(layer)[0, 0].tolist()
    matrix.check_against_reference(model, run, batch.inputs, 1e-9)


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_dropped_hidden_states(model, inputs, layer):
    rows: list[int] = []
    hooks = [
        module.mlp.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[1]))
        for module in model.get_decoder().layers
    ]
    try:
        run = matrix.compressed(model, FastV(layer=layer, drop_hidden_states=True), inputs)
    finally:
        for hook in hooks:
            hook.remove()
    columns = inputs["input_ids"].shape[1]
    visual = int((inputs["input_ids"] == families.IMAGE).sum())
    assert rows[:4] == [columns] * layer + [columns - visual // 2] * (4 - layer)
    assert int(run.cache.compressed[layer - 1].segments.lengths[0, 0]) == run.cache.seen  # the scoring layer keeps all
    matrix.check_against_reference(model, run, inputs, 1e-9)


def test_right_padding_scores_with_the_last_real_token(model):
    rows = [families.row(FAMILY, 1), families.row(FAMILY, 1, text=6, seed=1)]
    singles = [families.encode(FAMILY, [row], torch.float64) for row in rows]
    widths = [single["input_ids"].shape[1] for single in singles]
    assert widths[0] > widths[1]
    both = families.encode(FAMILY, rows, torch.float64)
    for name in ("input_ids", "attention_mask"):
        both[name][1] = both[name][1].roll(-(widths[0] - widths[1]))
    kept = []
    for inputs in (both, singles[1]):
        with torch.no_grad(), foveakv.compress(model, FastV()) as session:
            model(**inputs)
            kept.append(session.kept(3)[-1, 0])
    assert kept[0][kept[0] >= 0].tolist() == kept[1].tolist()


def test_beams(model, batch):
    run = matrix.compressed(model, FastV(), batch.inputs, num_beams=3)
    matrix.check_against_reference(model, run, batch.inputs, 1e-9, num_beams=3)


@families.images_in_chunks
def test_a_prompt_in_chunks_keeps_the_same(model, inputs):
    whole = matrix.compressed(model, FastV(), inputs)
    chunks = matrix.compressed(model, FastV(), inputs, prefill_chunk_size=20)
    assert torch.equal(whole.tokens, chunks.tokens)
    for a, b in zip(matrix.positions_held(whole), matrix.positions_held(chunks), strict=True):
        assert torch.equal(a, b)


def test_needs_visual_tokens_and_later_layers(model, inputs):
    with pytest.raises(NoVisualTokensError, match="fastv"):
        matrix.compressed(model, FastV(), families.encode(FAMILY, [families.Row((30,))], torch.float64))
    with pytest.raises(MethodError, match="no later layer"):
        matrix.compressed(model, FastV(layer=4), inputs)


@pytest.mark.parametrize("options", [{"layer": 0}, {"layer": "2"}, {"layer": "2,5"}, {"ratio": 0.0}, {"ratio": 1.5}])
def test_wrong_options(options):
    with pytest.raises(MethodError, match="fastv"):
        FastV(**options)


@pytest.mark.parametrize(("layer", "number"), [(0.0, 1), (0.5, 3), ("0.25", 2), ("calibrated", 3), (2, 2)])
@pytest.mark.parametrize("drop", [False, True])
def test_layers_as_shares_and_from_calibration(model, inputs, tmp_path, monkeypatch, layer, number, drop):
    """The same as K itself; "calibrated" is half of the depth where there is no file."""
    monkeypatch.setenv("FOVEAKV_CACHE", str(tmp_path))
    run = matrix.compressed(model, FastV(layer=layer, drop_hidden_states=drop), inputs)
    same = matrix.compressed(model, FastV(layer=number, drop_hidden_states=drop), inputs)
    assert run.cache.results.figures["layer"] == number
    for a, b in zip(matrix.positions_held(run), matrix.positions_held(same), strict=True):
        assert torch.equal(a, b)
    matrix.check_against_reference(model, run, inputs, 1e-9)


def test_no_layer_after_the_share(model, inputs):
    with pytest.raises(MethodError, match="no later layer"):
        matrix.compressed(model, FastV(layer=1.0), inputs)
    with pytest.raises(MethodError, match="fastv: layer must be a layer"):
        FastV(layer="best")
