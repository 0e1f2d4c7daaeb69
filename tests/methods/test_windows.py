"""Automatic windows and pools: the edges of their rules, and the same scores in a batch as alone."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from families import Picture, Row

from foveakv.core.prompt import IMAGE, PAD, TEXT, PromptMap
from foveakv.methods.windows import kept_window, pool_width, pooled, window_note, window_rows


def prompt(*parts: int, question: int = 6, markers: int = 3, padding: int = 0) -> PromptMap:
    """Images of `parts` tokens, `markers` text tokens before each, and a question after the last."""
    kinds = [PAD] * padding
    for tokens in parts:
        kinds += [TEXT] * markers + [IMAGE] * tokens
    return PromptMap(torch.tensor([kinds + [TEXT] * question]))


@pytest.mark.parametrize(
    ("question", "rows"), [(0, 4), (1, 4), (4, 4), (8, 4), (9, 5), (10, 5), (61, 31), (63, 32), (64, 32), (500, 32)]
)
def test_a_window_is_the_later_half_of_the_question(question: int, rows: int) -> None:
    assert window_rows(prompt(64, 64, question=question), "auto").tolist() == [rows]
    assert window_rows(prompt(64, question=question, padding=7), "auto").tolist() == [rows]
    assert window_rows(prompt(64, question=question), 9).tolist() == [9]


def test_a_text_has_the_papers_window() -> None:
    assert window_rows(PromptMap(torch.zeros(2, 50)), "auto").tolist() == [32, 32]


@pytest.mark.parametrize(
    ("tokens", "mean", "largest"),
    [(1, 1, 1), (64, 1, 1), (99, 1, 1), (100, 3, 3), (144, 3, 3), (277, 3, 3), (278, 5, 5), (544, 5, 5), (576, 5, 7),
     (5000, 5, 7)],
)  # fmt: skip
def test_a_pool_covers_three_tenths_of_a_row(tokens: int, mean: int, largest: int) -> None:
    at = prompt(tokens)
    assert pool_width(at, "auto", 5) == [mean]
    assert pool_width(at, "auto", 7) == [largest]
    assert pool_width(at, 9, 5) == [9]


def test_a_pool_goes_by_the_median_image_and_a_text_has_the_papers() -> None:
    assert pool_width(prompt(64, 576, 576), "auto", 5) == [5]
    assert pool_width(prompt(64, 64, 576), "auto", 5) == [1]
    assert pool_width(PromptMap(torch.zeros(1, 50)), "auto", 7) == [7]


def test_rows_that_single_tokens_separate_are_one_image() -> None:
    assert pool_width(prompt(*[24] * 24, markers=1), "auto", 5) == [5]
    assert pool_width(prompt(*[24] * 24, markers=2), "auto", 5) == [1]
    assert pool_width(prompt(*[24] * 3, markers=1), "auto", 5) == [1]  # three small images


def test_pools_by_hand() -> None:
    score = torch.tensor([[[0.0, 0, 3, 0, 0, 6]], [[0.0, 0, 3, 0, 0, 6]]])
    assert pooled(score, [1, 1], "mean") is score
    assert pooled(score, [3, 1], "mean")[:, 0].tolist() == [[0, 1, 1, 1, 2, 2], [0, 0, 3, 0, 0, 6]]
    assert pooled(score, [3, 3], "max")[1, 0].tolist() == [0, 3, 3, 3, 6, 6]


def test_a_kept_window_has_its_share() -> None:
    sizes, rows = torch.tensor([1, 4, 11, 12, 13, 99]), torch.tensor(6)
    assert kept_window(sizes, rows, 0.5).tolist() == [1, 2, 5, 6, 6, 6]
    assert kept_window(sizes, rows, 1.0).tolist() == [1, 4, 6, 6, 6, 6]


def test_a_note_says_if_the_budget_shrinks_the_window() -> None:
    rows, budgets = torch.tensor([6, 6]), torch.tensor([8, 99])
    kept, evicts = kept_window(budgets, rows, 0.5), torch.tensor([True, True])
    assert "window=6 (auto): only the newest 4" in window_note("auto", rows, kept, evicts, budgets)[0]
    assert window_note("auto", rows, kept, ~evicts, budgets) == ()


@pytest.mark.parametrize("name", ["snapkv", "adakv", "pyramidkv", "mixkv", "sparsemm", "hybridkv"])
def test_rows_with_windows_of_their_own_are_the_rows_alone(name: str) -> None:
    """Questions of different lengths, no question and no image, in one padded batch."""
    model = matrix.model("llava", torch.float64)
    rows = [Row((5, Picture(), 9)), Row((3, Picture(), 2, Picture(), 20)), Row((8, Picture())), Row((40,))]
    inputs = families.encode("llava", rows, torch.float64)
    options: dict[str, Any] = {"budget": 0.4, "window": "auto"}
    options.update({"chunk_size": 4, "theta": "auto"} if name == "hybridkv" else {"kernel": "auto"})
    method = matrix.method(name, **options)
    together = matrix.compressed(model, method, inputs)
    matrix.check_against_reference(model, together, inputs)
    for b, row in enumerate(rows):
        single = families.encode("llava", [row], torch.float64)
        kept = together.tokens[b : b + 1, -matrix.GREEDY["max_new_tokens"] :]
        follow = torch.cat([single["input_ids"], kept], 1)
        alone = matrix.compressed(model, method, single, follow=follow)
        for step, logits in enumerate(alone.logits):
            assert (together.logits[step][b, -1] - logits[0, -1]).abs().max() < 1e-6
