"""The embedded model through vLLM's Transformers backend: answers, and equality with transformers."""

from __future__ import annotations

from typing import Any

import engines
import pytest
from dropped_reference import Reference, check

from foveakv.models import embedded

pytestmark = pytest.mark.demo
CARDS = ((8, 2), (12, 9), (4, 1))


def test_a_quarter_of_the_visual_tokens_answers_as_well() -> None:
    path = embedded.assemble()
    samples = [embedded.sample_prompt(count, ask=ask) for count, ask in CARDS]
    prompts: list[dict[str, Any]] = [
        {"prompt": each.text, "multi_modal_data": {"image": each.images}} for each in samples
    ]
    reference = Reference(path)
    options = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": "calibrated"}
    more = {"model_impl": "transformers", "max_model_len": 2048, "limit_mm_per_prompt": {"image": 16}}
    with engines.engine(path, "hae", options, **more) as llm:
        outputs = engines.generate(llm, prompts, 8)
        outcomes = engines.outcomes(outputs)
    for sample, prompt, output, outcome in zip(samples, prompts, outputs, outcomes, strict=True):
        tokens, chosen = engines.chosen(output)
        check(reference.log_probabilities(prompt, outcome.kept, tokens), tokens, chosen)
        assert output.outputs[0].text.strip().startswith(sample.answer)
        assert len(outcome.kept) < 0.5 * outcome.prompt
        assert len(outcome.freed) == (outcome.prompt - len(outcome.kept)) // 32
