"""A method of your own in forty lines: it keeps all text, and the visual tokens with the shortest keys.

As a script it answers one prompt with it; every command takes the same file as a plugin:

python examples/own_method.py
foveakv --plugin examples/own_method.py compare --sample 8 --methods keynorm,snapkv --budgets 0.2
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from foveakv.core.budget import parse_budget
from foveakv.methods import Decision, Method, PrefillView, keep_top, register


@register
@dataclass
class KeyNorm(Method):
    """Keep all text and audio and, per KV head, the visual tokens with the shortest keys."""

    budget: float | int | str = 0.2

    name: ClassVar[str] = "keynorm"
    visual_only: ClassVar[bool] = True  # a prompt without images is then an error, not a silent no-op

    def __post_init__(self) -> None:
        parse_budget(self.budget)  # an invalid budget fails here, not in the middle of a run

    def prefill(self, view: PrefillView) -> Decision:
        """Called for each layer at the end of its prefill; `keep` is bool [B, H, C]."""
        candidates = view.candidates  # [B, 1 or H, C] what a head may keep: no padding
        visual = candidates & view.prompt.visual[:, None]
        other = candidates & ~visual  # text and audio
        room = view.budget_tokens(self.budget)[:, None] - other.sum(-1)  # tokens per head
        score = -view.keys.norm(dim=-1)  # [B, H, C]
        score = score.masked_fill(~visual, -torch.inf)  # -inf is never kept
        return Decision(keep=keep_top(score, room.clamp_min(0)) | other)


def main() -> None:
    import foveakv

    model, processor = foveakv.load("demo")
    sample = foveakv.sample_prompt(8, ask=2)
    inputs = foveakv.build_inputs(processor, sample.text, sample.images, model=model)
    with foveakv.compress(model, KeyNorm(budget=0.5)) as session:
        output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    reply = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{sample.question}{reply.strip()} (expected {sample.answer})")
    print(session.report)


if __name__ == "__main__":
    main()
