"""LOOK-M after the prompt: merged slots against a merge and an attention of our own, step by step."""

from __future__ import annotations

from typing import Any

import families
import masked_reference
import matrix
import pytest
import torch
import witness
from masked_reference import largest_difference, recorded
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_gradients")


def merge(states: Tensor, places: list[int], gone: list[int], partner: list[int], cosine: Tensor, how: str) -> Tensor:
    """Rows `places` of states [C, D], each with the evicted rows that chose it, by the formulas of the paper."""
    rows = []
    for number, place in enumerate(places):
        kept = states[place]
        mine = [i for i, chosen in enumerate(partner) if chosen == number]
        total = kept.clone()
        for i in mine:
            evicted = states[gone[i]]
            total = total + {"mean": evicted, "pivot": (evicted + kept) / 2, "weighted": cosine[i] * evicted}[how]
        rows.append(total / (len(mine) + 1))
    return torch.stack(rows)


class Merged:
    """Attention of the plain model over its own cache, in which the first decode step finds the prompt merged.

    `kept`: for every layer the prompt positions [B, H, M] that stay, -1 for none; `real`: bool [B, C]. The rest of the
    prompt is merged into them once, as attention reads it; decoded tokens follow.
    """

    def __init__(self, kept: dict[int, Tensor], real: Tensor, how: str) -> None:
        self.kept, self.real, self.how = kept, real, how
        self.made: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def slots(self, layer: int, b: int, h: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Merged keys and values of one head, from the plain prompt's key and value [C, D]."""
        if (layer, b, h) not in self.made:
            places = [p for p in self.kept[layer][b, h].tolist() if p >= 0]
            gone = [c for c in range(len(key)) if bool(self.real[b, c]) and c not in places]
            cosine = torch.cosine_similarity(key[gone][:, None], key[places][None], dim=-1)
            partner = cosine.argmax(1).tolist()
            found = [merge(states, places, gone, partner, cosine.amax(1), self.how) for states in (key, value)]
            self.made[layer, b, h] = found[0], found[1]
        return self.made[layer, b, h]

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        columns, group = self.real.shape[1], query.shape[1] // key.shape[1]
        if query.shape[2] > 1:
            return masked_reference._attention(module, query, key, value, mask, **kwargs)
        output = torch.zeros_like(query[..., :1]).expand(*query.shape[:3], value.shape[-1]).clone()
        for b in range(len(query)):
            for head in range(query.shape[1]):
                h = head // group
                keys, values = self.slots(module.layer_idx, b, h, key[b, h, :columns], value[b, h, :columns])
                keys = torch.cat([keys, key[b, h, columns:]])
                values = torch.cat([values, value[b, h, columns:]])
                weights = (keys @ query[b, head, 0] * kwargs["scaling"]).softmax(0)
                output[b, head, 0] = weights @ values
        return output.transpose(1, 2), None


@pytest.mark.parametrize("how", ["pivot", "mean", "weighted"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_decode_steps_over_merged_slots(family: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = matrix.model(family, torch.float64), families.batch(family, dtype=torch.float64).inputs
    method = matrix.method("lookm", merge=how, budget=0.3)
    run = matrix.compressed(model, method, inputs, max_new_tokens=4)
    witness.check(run.trace, run.stored)
    columns = inputs["input_ids"].shape[1]
    kept = {layer: held[0].masked_fill(held[0] >= columns, -1) for layer, held in run.stored[1].items()}
    own = Merged(kept, inputs["attention_mask"] == 1, how)
    before = model.get_decoder().config._attn_implementation
    monkeypatch.setitem(masked_reference.AttentionInterface._global_mapping, masked_reference.NAME, own.attention)
    try:
        with masked_reference.masked(model, [{}] * 4), recorded(model) as want:
            matrix.plain(model, inputs, follow=run, max_new_tokens=4)
    finally:
        assert model.get_decoder().config._attn_implementation == before
    assert largest_difference(run.logits, want) < 1e-6
    for layer, (positions, keys, values) in run.stored[1].items():
        assert keys is not None
        assert values is not None
        for b in range(positions.shape[0]):
            for h in range(positions.shape[1]):
                order = [i for i, p in enumerate(positions[b, h].tolist()) if 0 <= p < columns]
                merged_keys, merged_values = own.made[layer, b, h]
                assert (keys[b, h, order] - merged_keys).abs().max() < 1e-9
                assert (values[b, h, order] - merged_values).abs().max() < 1e-9
    with masked_reference.masked(model, run.trace), recorded(model) as unmerged:
        monkeypatch.undo()
        matrix.plain(model, inputs, follow=run, max_new_tokens=4)
    assert largest_difference(run.logits[1:], unmerged[1:]) > 1e-3, "merging is not felt in the logits"
