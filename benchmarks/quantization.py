"""How 8-bit and 4-bit slots change the embedded model's answers, for docs/quantization.md.

    python -m benchmarks.quantization

First greedy answers of 16 tokens (six cards of a kind), then the right answer fed token by token (five cards): KL
divergence of the next-token distribution from the one without quantization. Full cache throughout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import foveakv
from foveakv.engines.transformers import compat
from foveakv.models.embedded import sample_prompt
from foveakv.models.inputs import build_inputs

SETTINGS: list[dict[str, Any]] = [
    {"kv_dtype": kind, "residual_length": window} for kind in ("int8", "int4") for window in (32, 0)
]


def answer(model: Any, inputs: dict[str, Any], **options: Any) -> tuple[list[int], float]:
    """16 greedy tokens, and full bytes over stored bytes."""
    with foveakv.compress(model, foveakv.methods.get("full"), **options) as session:
        tokens = model.generate(**inputs, max_new_tokens=16, min_new_tokens=16, do_sample=False)
        return tokens[0, inputs["input_ids"].shape[1] :].tolist(), session.report.compression


def distributions(model: Any, inputs: dict[str, Any], answer: Tensor, **options: Any) -> Tensor:
    """Log-probabilities [tokens, vocabulary] after every token of the answer [tokens]."""
    argument, steps = compat.cache_argument(model), []
    with foveakv.compress(model, foveakv.methods.get("full"), **options) as session:
        model(**inputs, use_cache=True)
        for i, token in enumerate(answer):
            mask = torch.ones(1, inputs["input_ids"].shape[1] + i + 1, dtype=torch.long)
            output = model(input_ids=token.view(1, 1), attention_mask=mask, **{argument: session.cache})
            steps.append(output.logits[0, -1].log_softmax(-1))
    return torch.stack(steps)


@torch.no_grad()
def main() -> None:
    model, processor = foveakv.load("demo")
    for kind in ("digit", "number", "word"):
        sample = sample_prompt(6, kind=kind, ask=-1)
        inputs = build_inputs(processor, sample.text, sample.images, model=model)
        plain, _ = answer(model, inputs)
        for options in SETTINGS:
            tokens, ratio = answer(model, inputs, **options)
            equal = next((i for i, (a, b) in enumerate(zip(tokens, plain, strict=True)) if a != b), 16)
            print(f"{kind} {options}: {equal} of 16 leading tokens equal, full / stored {ratio:.1f}")
    for kind in ("digit", "number"):
        sample = sample_prompt(5, kind=kind, ask=-1)
        inputs = build_inputs(processor, sample.text, sample.images, model=model)
        right = processor.tokenizer(sample.answer, return_tensors="pt", add_special_tokens=False).input_ids[0]
        plain_steps = distributions(model, inputs, right)
        for options in SETTINGS:
            steps = distributions(model, inputs, right, **options)
            divergence = (plain_steps.exp() * (plain_steps - steps)).sum(-1)
            same = int((plain_steps.argmax(-1) == steps.argmax(-1)).sum())
            print(
                f"{kind} {options}: KL mean {divergence.mean():.1e}, highest {divergence.max():.1e}; "
                f"{same} of {len(right)} best tokens the same"
            )


if __name__ == "__main__":
    main()
