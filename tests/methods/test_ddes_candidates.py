"""DDES whose candidates are the tokens of the prompt, while they last."""

import pytest
import torch
from simulated import Simulation

from foveakv.methods.ddes import RecycleBin


def start(scores: list[float]) -> torch.Tensor:
    return torch.tensor([[scores]], dtype=torch.float32)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", ["rerank", "mark"])
def test_candidates_of_the_prompt_only_while_they_last(size, mode):
    """Decoded tokens stay, whatever they receive, until the prompt has too few candidates; then all are."""
    run = Simulation(RecycleBin(size=size, mode=mode, restore=False, sink=1), start([9, 6, 7, 8]), steady=4, recent=0)
    run.layer.prompt = torch.tensor([4])
    gone = [run.step([0.0] * (run.seen + 1)) for _ in range(3 * size)]
    evicted = [token for step in gone for token in step]
    assert evicted[:3] == [1, 2, 3] if size == 1 else evicted[:2] == [1, 2]
    if size == 1:
        assert run.step([0.0] * (run.seen + 1)) == [4]  # of equals, the oldest that is not a sink
        assert run.kept() == [0, 5, 6, 7]
        return
    # One candidate of the prompt is left, and a flush needs two. A bin that is not ranked again has marked it before.
    assert evicted[2:] == ([4, 5, 6, 7] if mode == "rerank" else [3, 4, 5, 6])


def test_candidates_of_the_prompt_in_a_ragged_batch_per_head():
    """Every sequence opens for itself; heads choose for themselves."""
    scores = torch.tensor([[[5.0, 1, 2, 3], [1.0, 5, 2, 3]], [[5.0, 1, 2, 3], [3.0, 2, 1, 5]]])
    run = Simulation(RecycleBin(size=1, per_head=True), scores, steady=[3, 2])
    run.layer.prompt = torch.tensor([4, 1])  # the second sequence opens at once
    attention = torch.zeros(2, 2, 5)
    run.step(attention)
    assert [run.kept(0, head) for head in range(2)] == [[0, 3, 4], [1, 3, 4]]
    assert [run.kept(1, head) for head in range(2)] == [[0, 3], [0, 3]]
