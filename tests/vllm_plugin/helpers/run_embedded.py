"""Answer sample prompts with the embedded model in vLLM, and print what came out as one line of JSON.

A process of its own, since vLLM's Transformers backend changes the model classes of transformers in its process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import engines

from foveakv.models import embedded

OPTIONS = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": "calibrated"}
MORE = {"model_impl": "transformers", "max_model_len": 2048, "limit_mm_per_prompt": {"image": 16}}


def main(cards: list[list[int]]) -> None:
    """cards: number of cards and the one to ask for, per prompt."""
    samples = [embedded.sample_prompt(count, ask=ask) for count, ask in cards]
    prompts = [{"prompt": each.text, "multi_modal_data": {"image": each.images}} for each in samples]
    found = []
    with engines.engine(embedded.assemble(), "hae", OPTIONS, **MORE) as llm:
        outputs = engines.generate(llm, prompts, 8)
        for output, outcome in zip(outputs, engines.outcomes(outputs), strict=True):
            tokens, chosen = engines.chosen(output)
            text = output.outputs[0].text
            found.append({**asdict(outcome), "tokens": tokens, "chosen": chosen, "text": text})
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
