"""The comparison engine: agreement, costs, failures of single methods."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import families
import pytest
import torch

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.api import compress
from foveakv.errors import BudgetError, InputError, MethodError
from foveakv.evaluation.compare import (
    BASELINE,
    Candidate,
    agreement,
    candidates,
    compare,
    kept_share,
    storage_nbytes,
)
from foveakv.methods import Decision, Method, PrefillView
from foveakv.methods.full import Full
from foveakv.methods.snapkv import SnapKV
from foveakv.util.texts import one_line, printable
from foveakv.util.timing import StepClock


@dataclass
class Half(Method):
    """Drops every second column; breaks on demand."""

    fails: bool = False
    name: ClassVar[str] = "half"

    def prefill(self, view: PrefillView) -> Decision:
        if self.fails:
            raise MethodError("half: asked to fail")
        return Decision(keep=(view.positions % 2 == 0)[:, None])


@pytest.fixture(scope="module")
def model() -> Any:
    """In fp64: the runs of a comparison choose for themselves, and no near tie can part those that must agree."""
    return families.build("llava", dtype=torch.float64)


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    return families.prompt("llava", images=2, dtype=torch.float64)


def test_agreement() -> None:
    assert agreement([1, 2, 3, 4], [1, 2, 9, 4]) == (0.5, 0.75)
    assert agreement([1, 2], [1, 2, 3, 4]) == (0.5, 0.5)
    assert agreement([1, 2], [1, 2]) == (1.0, 1.0)
    assert agreement([], []) == (1.0, 1.0)
    assert agreement([1], []) == (0.0, 0.0)


def test_full_agrees_and_half_stores_less(model: Any, inputs: dict[str, Any]) -> None:
    result = compare(
        model, inputs, [Full(), Half()], max_new_tokens=6, decode=lambda tokens: " ".join(map(str, tokens))
    )
    plain, full, half = result.rows
    assert [row.label for row in result.rows] == [BASELINE, "full", "half"]
    assert full.tokens == plain.tokens
    assert (full.prefix_agreement, full.equal_tokens) == (1.0, 1.0)
    assert plain.prefix_agreement is None
    assert half.stored_bytes < 0.75 * full.stored_bytes
    assert half.full_bytes == plain.stored_bytes
    assert half.evicted > 0
    assert result.visual_tokens == 32
    assert result.prompt_tokens == inputs["input_ids"].shape[1]
    assert all(row.prefill_seconds > 0 and row.token_seconds for row in result.rows)
    assert plain.text == " ".join(map(str, plain.tokens))
    json.dumps(result.to_dict())


def test_a_method_that_fails_leaves_the_others(model: Any, inputs: dict[str, Any]) -> None:
    result = compare(model, inputs, [Half(fails=True), Full()], max_new_tokens=3)
    assert [row.label for row in result.failures] == ["half"]
    assert result.rows[1].error == "MethodError: half: asked to fail"
    assert result.rows[2].prefix_agreement == 1.0
    assert "failed" in render(result)


def render(result: Any) -> str:
    from rich.console import Console

    console = Console(width=110)
    with console.capture() as capture:
        console.print(result.table())
    return capture.get()


def test_table_has_a_line_per_row(model: Any, inputs: dict[str, Any]) -> None:
    text = render(compare(model, inputs, [Candidate("every second", Half())], max_new_tokens=3))
    assert "every second" in text
    assert BASELINE in text


def test_short_answers_are_flagged(model: Any, inputs: dict[str, Any]) -> None:
    assert "the answer has 2 tokens" in compare(model, inputs, [Full()], max_new_tokens=2).notes[0]
    assert compare(model, inputs, [Full()], max_new_tokens=3).notes == []


def test_ignore_eos_decodes_to_the_end(model: Any, inputs: dict[str, Any]) -> None:
    stop = int(model.generate(**inputs, max_new_tokens=2, do_sample=False)[0, -1])
    model.generation_config.eos_token_id = stop
    try:
        assert len(compare(model, inputs, [Full()], max_new_tokens=6).baseline.tokens) == 2
        ended = compare(model, inputs, [Full()], max_new_tokens=6, ignore_eos=True)
    finally:
        model.generation_config.eos_token_id = None
    assert [len(row.tokens) for row in ended.rows] == [6, 6]


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\x0e\n\tc\x9b") == "a[31mb\n\tc"
    assert one_line(" a\x07\n b ") == "a b"


def test_repeats_are_run(model: Any, inputs: dict[str, Any]) -> None:
    calls: list[str] = []
    result = compare(
        model, inputs, [Full()], max_new_tokens=2, repeats=3, progress=lambda label, done, total: calls.append(label)
    )
    assert result.repeats == 3
    assert calls == ["warm-up", *[BASELINE, "full"] * 3]


def test_one_prompt_only(model: Any) -> None:
    with pytest.raises(InputError, match="one prompt"):
        compare(model, families.batch("llava").inputs, [Full()])
    with pytest.raises(InputError, match="at least 1"):
        compare(model, families.prompt("llava"), [Full()], repeats=0)


def test_candidates_multiply_budgets() -> None:
    made = candidates(["full", "snapkv"], [0.1, 64], {"snapkv": {"window": 8}})
    assert [item.label for item in made] == ["full", "snapkv 0.1", "snapkv 64"]
    assert made[2].method.describe() == {"method": "snapkv", **vars(SnapKV(budget=64, window=8))}
    assert [item.label for item in candidates(["snapkv"], [0.1], {"snapkv": {"budget": 0.5}})] == ["snapkv"]


def test_candidates_refuse_mistakes() -> None:
    with pytest.raises(MethodError, match="did you mean 'snapkv'"):
        candidates(["snapvk"])
    with pytest.raises(MethodError, match="'h2o', which is not one of the methods"):
        candidates(["full"], [], {"h2o": {}})
    with pytest.raises(BudgetError):
        candidates(["snapkv"], [1.5])
    with pytest.raises(MethodError, match="at least one"):
        candidates([])


def test_kept_share_counts_layers_and_heads(model: Any, inputs: dict[str, Any]) -> None:
    with compress(model, Half()) as session:
        model.generate(**inputs, max_new_tokens=3)
        share = kept_share(session.cache)
    columns = inputs["input_ids"].shape[1]
    assert share.tolist() == [1.0 if column % 2 == 0 else 0.0 for column in range(columns)]


def test_clock_counts_every_pass_and_goes_away(model: Any, inputs: dict[str, Any]) -> None:
    hooks = len(model._forward_hooks)
    with StepClock(model) as clock:
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert len(clock.seconds) == 4
    assert len(model._forward_hooks) == hooks


def test_storage_counts_shared_storage_once(model: Any, inputs: dict[str, Any]) -> None:
    cache = compat.DynamicCache(config=compat.text_config_of(model))
    model.generate(**inputs, max_new_tokens=1, **{compat.cache_argument(model): cache})
    tokens, config = inputs["input_ids"].shape[1], compat.text_config_of(model)
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    assert storage_nbytes(cache) == 2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize * tokens
