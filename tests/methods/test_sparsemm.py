"""SparseMM: head budgets worked out by hand, score files and their errors, and what a model then holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import matrix
import pytest
import torch

import foveakv
from foveakv import SparseMM, errors
from foveakv.analysis.head_scores import load_head_scores, save_head_scores
from foveakv.cli.settings import build_method
from foveakv.methods.sparsemm import head_budgets

SCORES = matrix.HEAD_SCORES


def numbers(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_budgets_by_hand() -> None:
    # 4 heads, 10 slots each in the mean: 1 each, and 36 by score
    assert head_budgets(numbers([1, 2], [1, 0]), 10, 100, 0.1).tolist() == [[10, 19], [10, 1]]
    # all equal where no head has a score, or with ratio 1
    assert head_budgets(numbers([0, 0], [0, 0]), 10, 100, 0.1).tolist() == [[10, 10], [10, 10]]
    assert head_budgets(numbers([1, 2], [1, 0]), 10, 100, 1.0).tolist() == [[10, 10], [10, 10]]
    # clipped at 13: the 6 slots too many go to the others, in proportion to 10, 10 and 1
    assert head_budgets(numbers([1, 2], [1, 0]), 10, 13, 0.1).tolist() == [[13, 13], [13, 1]]
    # without an equal share a head without a score gets nothing beyond the window
    assert head_budgets(numbers([1, 1], [1, 0]), 9, 100, 0.0).tolist() == [[12, 12], [12, 0]]


def test_budgets_sum_to_the_total() -> None:
    torch.manual_seed(0)
    for mean in (0, 1, 3, 17, 40):
        for most in (mean, mean + 1, 2 * mean + 3, 50 * mean + 1):
            for ratio in (0.0, 0.1, 0.7):
                budgets = head_budgets(torch.rand(5, 4, dtype=torch.float64) ** 4, mean, most, ratio)
                assert int(budgets.sum()) == 20 * mean
                assert int(budgets.min()) >= 0
                assert int(budgets.max()) <= most


def test_heads_of_a_model() -> None:
    """Every head holds the window and its budget beyond it; what it holds are SnapKV's best."""
    model, inputs = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64)
    columns = inputs["input_ids"].shape[1]
    method = SparseMM(budget=16, window=6, head_scores=SCORES)
    run = matrix.compressed(model, method, inputs, max_new_tokens=1)
    want = head_budgets(numbers(*SCORES), 10, columns - 6, 0.1) + 6
    got = torch.stack([layer.segments.lengths[0] for layer in run.cache.compressed])
    assert torch.equal(got, want)
    assert len(got.unique()) > 2
    for layer, budgets in enumerate(want.tolist()):
        for head, budget in enumerate(budgets):
            snap = foveakv.SnapKV(budget=budget, window=6, window_share=1)
            other = matrix.compressed(model, snap, inputs, max_new_tokens=1)
            ours, theirs = run.cache.kept(layer)[0, head], other.cache.kept(layer)[0, head]
            assert ours[ours >= 0].tolist() == theirs[theirs >= 0].tolist()


@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_files(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"scores.{ending}"
    save_head_scores(numbers(*SCORES), path)
    assert torch.allclose(load_head_scores(path), numbers(*SCORES))
    model, inputs = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64)
    runs = [
        matrix.compressed(model, matrix.method("sparsemm", head_scores=given), inputs)
        for given in (str(path), path, numbers(*SCORES), SCORES)
    ]
    for run in runs[1:]:
        assert torch.equal(run.tokens, runs[0].tokens)
        for own, other in zip(matrix.positions_held(run), matrix.positions_held(runs[0]), strict=True):
            assert torch.equal(own, other)
    assert runs[0].session.report.settings["head_scores"] == str(path)
    assert runs[1].session.report.settings["head_scores"] == str(path)
    assert runs[2].session.report.settings["head_scores"] == "4 x 2 numbers"


def test_missing_scores_say_how_to_make_them() -> None:
    with pytest.raises(errors.MethodError, match=r"sparsemm: head_scores must be given; .*visual_head_scores"):
        SparseMM()


@pytest.mark.parametrize(("text", "message"), [
    ("not json", "cannot be read"),
    ('{"other": [[1]]}', 'no "scores"'),
    ("[1, 2]", r"numbers \[layers\]\[KV heads\]"),
    ("[[1, 2], [3]]", r"numbers \[layers\]\[KV heads\]"),
    ('[["a"]]', r"numbers \[layers\]\[KV heads\]"),
    ("[[1, -2]]", "not negative"),
    ("[[NaN, 2]]", "finite"),
    ("[]", r"numbers \[layers\]\[KV heads\]"),
])  # fmt: skip
def test_files_that_hold_no_scores(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "scores.json"
    path.write_text(text)
    with pytest.raises(errors.MethodError, match=message):
        SparseMM(head_scores=str(path))


def test_wrong_places_and_names(tmp_path: Path) -> None:
    with pytest.raises(errors.MethodError, match="there is no file"):
        SparseMM(head_scores=str(tmp_path / "gone.json"))
    with pytest.raises(errors.MethodError, match=r"\.json or \.safetensors"):
        save_head_scores(numbers([1.0]), tmp_path / "scores.txt")
    with pytest.raises(errors.MethodError, match="not negative"):
        save_head_scores(numbers([-1.0]), tmp_path / "scores.json")


@pytest.mark.parametrize("scores", [SCORES[:3], [[*row, 0.1] for row in SCORES]])
def test_scores_of_another_model(scores: Any) -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava")
    with (
        foveakv.compress(model, SparseMM(head_scores=scores)),
        pytest.raises(
            errors.MethodError, match=r"are for \d layers with \d KV heads each, and this model has 4 with 2"
        ),
    ):
        model.generate(**inputs, max_new_tokens=1)


def test_only_the_compressed_layers_share_the_budget() -> None:
    """Gemma 3 here has two layers with sliding windows: their rows of the file are not used."""
    model, inputs = matrix.model("gemma3", torch.float64), families.prompt("gemma3", dtype=torch.float64)
    run = matrix.compressed(model, matrix.method("sparsemm", budget=16), inputs, max_new_tokens=1)
    layers = [layer.layer_idx for layer in run.cache.compressed]
    assert len(layers) == 2
    assert sum(int(layer.segments.lengths.sum()) for layer in run.cache.compressed) == 16 * 2 * 2


def test_a_file_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    save_head_scores(numbers(*SCORES), path)
    method = build_method("sparsemm", "0.25", [f"head_scores={path}", "window=8"])
    assert method == SparseMM(budget=0.25, window=8, head_scores=str(path))
