"""DDES against greedy eviction on recorded attention: how much attention falls on tokens that are no longer stored."""

import families
import matrix
import pytest
import torch
from simulated import Simulation
from torch import Tensor

from foveakv.methods.ddes import RecycleBin


@pytest.fixture(scope="module")
def traces() -> list[tuple[Tensor, list[Tensor]]]:
    """Of plain runs, per layer: the prompt's column sums [1, H, C] and each step's attention [1, H, T]."""
    recorded = []
    for family in ("llava", "qwen2_5_vl"):
        model = families.build(family)
        model.set_attn_implementation("eager")
        output = model.generate(
            **families.prompt(family), **{**matrix.GREEDY, "max_new_tokens": 40}, output_attentions=True
        )
        for layer in range(4):
            steps = [step[layer].unflatten(1, (2, -1)).sum((2, 3)) for step in output.attentions]
            recorded.append((steps[0], steps[1:]))
    return recorded


def attention_lost(size: int, prompt: Tensor, steps: list[Tensor], recent: int = 0, less: int = 0) -> float:
    """Attention of the full run that falls on tokens a policy no longer stores, summed over steps and heads.

    The steady size l is half the prompt, minus `less`.
    """
    run = Simulation(RecycleBin(size=size), prompt, steady=prompt.shape[-1] // 2 - less, recent=recent)
    everything = torch.ones_like(prompt, dtype=torch.bool)
    run.segments.keep(run.rules.shrink(prompt, everything, run.layer.steady, run.layer.recent))
    lost = 0.0
    for attention in steps:
        stored = torch.zeros_like(attention, dtype=torch.bool)
        held = run.segments.positions()
        stored.scatter_(-1, held.clamp_min(0), held >= 0)
        stored[..., -1] = True
        lost += float(attention.masked_fill(stored, 0).sum())
        run.step(attention)
    return lost


@pytest.mark.parametrize("less", [0, 7], ids=["same steady size", "same peak"])
def test_share_of_traces_on_which_the_bin_loses_no_more_than_greedy(traces, less):
    """A measurement, not a guarantee: the share is printed, and only that it can be computed is asserted."""
    pairs = [(attention_lost(8, *trace, less=less), attention_lost(1, *trace)) for trace in traces]
    share = sum(ddes <= greedy for ddes, greedy in pairs) / len(pairs)
    ratio = sum(ddes for ddes, _ in pairs) / sum(greedy for _, greedy in pairs)
    print(f"{less} tokens less: on {share:.0%} of {len(pairs)} traces; mass lost {ratio:.2f} of greedy's")
    assert len(pairs) == 8
    assert all(ddes >= 0 and greedy > 0 for ddes, greedy in pairs)
