"""The reference itself, against the plain model and against attention written out by hand."""

from __future__ import annotations

import families
import pytest
import torch
from masked_reference import everything, largest_difference, masked, recorded
from torch import Tensor

GREEDY = {"max_new_tokens": 5, "do_sample": False}


def default_layers(model: object) -> list[int]:
    config = model.get_decoder().config  # type: ignore[attr-defined]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [i for i, kind in enumerate(kinds) if kind == "full_attention"]


def random_trace(steps: int, columns: int, mask: Tensor, layers: list[int], heads: int) -> list[dict[int, Tensor]]:
    """A trace by hand: each head forgets its own random half of the prompt after the prefill, and some more later."""
    generator = torch.Generator().manual_seed(5)
    batch = len(mask)
    real = mask[:, None].bool()
    alive = {layer: (torch.rand(batch, heads, columns, generator=generator) < 0.5) & real for layer in layers}
    trace: list[dict[int, Tensor]] = [{}]
    for step in range(1, steps):
        end = columns + step
        entry = {}
        for layer in layers:
            grown = torch.cat([alive[layer], torch.ones(batch, heads, 1, dtype=torch.bool)], -1)
            if step > 2:
                grown[..., :-1] &= torch.rand(batch, heads, end - 1, generator=generator) < 0.9
            alive[layer] = grown
            width = int(grown.sum(-1).max())
            positions = torch.full((batch, heads, width), -1)
            for b in range(batch):
                for h in range(heads):
                    kept = grown[b, h].nonzero()[:, 0]
                    positions[b, h, : len(kept)] = kept[torch.randperm(len(kept), generator=generator)]
            entry[layer] = positions
        trace.append(entry)
    return trace


@pytest.mark.parametrize("name", families.PLAIN)
def test_keeping_all_is_the_plain_model_and_forgetting_half_is_felt(name: str) -> None:
    """If forgetting were not felt, a test of eviction on these models would prove nothing."""
    model = families.build(name, dtype=torch.float64)
    inputs = families.batch(name, dtype=torch.float64).inputs
    batch, columns = inputs["input_ids"].shape
    layers = default_layers(model)
    with recorded(model) as plain:
        expected = model.generate(**inputs, **GREEDY)

    trace = everything(columns, 5, layers, families.KV_HEADS, batch)
    with masked(model, trace) as replay, recorded(model) as got:
        tokens = model.generate(**inputs, **GREEDY)
    assert torch.equal(tokens, expected)
    assert largest_difference(got, plain) < 1e-6
    assert replay.layers_masked == 4 * len(layers)

    trace = random_trace(5, columns, inputs["attention_mask"], layers, families.KV_HEADS)
    with masked(model, trace), recorded(model) as got:
        model.generate(**inputs, **GREEDY)
    assert (got[0][:, -1] - plain[0][:, -1]).abs().max() < 1e-6  # the prefill sees everything
    assert (got[1] - plain[1]).abs().amax(dim=(1, 2)).min() > 0.02  # and every row feels the loss after it


def llama_by_hand(model: object, ids: Tensor, positions: Tensor, allowed: list[Tensor]) -> Tensor:
    """All logits of a llama over whole rows at once; allowed[layer]: bool [B, H, C, C]. The model gives weights."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    config = model.config  # type: ignore[attr-defined]
    dim = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight

    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
    angles = positions[..., None].double() * frequencies
    cos, sin = (torch.cat([f, f], -1)[:, None] for f in (angles.cos(), angles.sin()))

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        w = {name.split(f"layers.{layer}.")[1]: value for name, value in weights.items() if f"layers.{layer}." in name}
        y = norm(x, w["input_layernorm.weight"])
        q, k, v = ((y @ w[f"self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, dim)).transpose(1, 2) for p in "qkv")
        q, k = rotate(q), rotate(k)
        k, v, seen = (t.repeat_interleave(group, 1) for t in (k, v, allowed[layer]))
        scores = (q @ k.transpose(-1, -2) / dim**0.5).masked_fill(~seen, -torch.inf)
        y = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2).flatten(2)
        x = x + y @ w["self_attn.o_proj.weight"].T
        y = norm(x, w["post_attention_layernorm.weight"])
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def test_a_trace_by_hand_equals_attention_by_hand() -> None:
    model = families.build("llama", dtype=torch.float64)
    inputs = families.batch("llama").inputs
    mask, columns = inputs["attention_mask"], inputs["input_ids"].shape[1]
    trace = random_trace(5, columns, mask, [0, 1, 2, 3], families.KV_HEADS)
    with masked(model, trace), recorded(model) as got:
        tokens = model.generate(**inputs, **GREEDY)
    total = columns + 4
    full_mask = torch.nn.functional.pad(mask, (0, 4), value=1)
    positions = (full_mask.cumsum(-1) - 1).clamp_min(0)
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    allowed = []
    for layer in range(4):
        seen = (causal & full_mask[:, None, None, :].bool()).repeat(1, families.KV_HEADS, 1, 1)
        for step in range(1, 5):
            seen[:, :, columns + step - 1] &= _marks(trace[step][layer], total)
        allowed.append(seen)
    want = llama_by_hand(model, tokens[:, :total], positions, allowed)
    for step in range(5):  # transformers rounds norms and RoPE to fp32
        assert (got[step][:, -1] - want[:, columns + step - 1]).abs().max() < 1e-5


def _marks(positions: Tensor, total: int) -> Tensor:
    """[B, H, M] positions -> bool [B, H, total]."""
    marks = torch.zeros(*positions.shape[:2], total + 1, dtype=torch.bool)
    marks.scatter_(2, torch.where(positions < 0, total, positions), True)
    return marks[..., :total]


def test_tokens_that_left_the_residual_stream_equal_a_shorter_sequence() -> None:
    """Masking a token as a key in later layers is the same, for all other tokens, as taking it out there."""
    model = families.build("llama", dtype=torch.float64)
    ids = families.prompt("llama")["input_ids"]
    columns = ids.shape[1]
    left = torch.ones(1, columns, dtype=torch.bool)
    left[0, 5:20] = False
    with masked(model, [{}], left=left), recorded(model) as got, torch.no_grad():
        model(input_ids=ids)
    causal = torch.ones(columns, columns, dtype=torch.bool).tril().expand(1, families.KV_HEADS, -1, -1)
    positions = torch.arange(columns)[None]
    shorter = [causal] + [causal & left[:, None, None, :]] * 3
    want = llama_by_hand(model, ids, positions, shorter)
    assert (got[0] - want)[left].abs().max() < 1e-5
    assert (got[0] - llama_by_hand(model, ids, positions, [causal] * 4))[left].abs().max() > 0.01


def test_the_replay_complains_about_a_trace_that_does_not_fit() -> None:
    model = families.build("llama")
    inputs = families.prompt("llama")
    with pytest.raises(AssertionError, match="more forward passes"), masked(model, [{}]):
        model.generate(**inputs, **GREEDY)
    twice = [{}, {0: torch.tensor([[[3, 3], [1, -1]]])}]
    with pytest.raises(AssertionError, match="twice"), masked(model, twice):
        model.generate(**inputs, max_new_tokens=2)
    beyond = [{}, {0: torch.tensor([[[3, 999], [1, -1]]])}]
    with pytest.raises(AssertionError, match="999"), masked(model, beyond):
        model.generate(**inputs, max_new_tokens=2)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
