"""What compression adds to a prefill, and what HAE with drop_hidden_states takes away from it.

Two-layer slices of Qwen2.5-VL-7B's text decoder with random weights and a tiny vision tower; three quarters of the
prompt are visual tokens. Two figures: the wall time of the whole prefill against the plain model, in turns; and the
share of a plain prefill that the library's own work after each layer's attention takes (less noise, same claim).
"""

from __future__ import annotations

import time
from typing import Any

import torch

import foveakv
from benchmarks.common import in_turns, spread
from benchmarks.methods import at_budget
from foveakv import methods
from foveakv.layer import CompressedLayer

IMAGE_TOKEN, START, END = 990, 991, 992


def model(layers: int = 2) -> Any:
    """Qwen2.5-VL-7B's decoder cut to `layers`, fp32, random weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "vocab_size": 1000,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": layers,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "fullatt_block_indexes": [],
        "window_size": 112,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=993,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    with torch.device("meta"):
        made = Qwen2_5_VLForConditionalGeneration(config)
    # Fast init: seconds instead of minutes for half a billion random numbers.
    made = made.to_empty(device="cpu")
    for name, parameter in made.named_parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(0.0 if "bias" in name else 1.0)
        else:
            parameter.data.uniform_(-0.03, 0.03)
    for module in made.modules():
        rebuild_rotary(module)
    return made.eval()


def rebuild_rotary(module: torch.nn.Module) -> None:
    """Rotary frequencies are buffers computed in the constructor, so they are lost on the meta device."""
    if "inv_freq" not in dict(module.named_buffers(recurse=False)):
        return
    fresh = type(module)(module.config if hasattr(module, "config") else module.inv_freq.shape[0] * 2)
    for name, buffer in fresh.named_buffers(recurse=False):
        setattr(module, name, buffer)


def inputs(tokens: int) -> dict[str, Any]:
    """A prompt of exactly `tokens` tokens, 3/4 of them one image."""
    side = int((tokens * 0.75) ** 0.5) // 4 * 4
    visual = side * side
    text = tokens - visual - 2
    ids = [10 + i % 900 for i in range(text // 8)] + [START] + [IMAGE_TOKEN] * visual + [END]
    ids += [10 + i % 900 for i in range(text - text // 8)]
    input_ids = torch.tensor([ids])
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == IMAGE_TOKEN).int(),
        "pixel_values": torch.randn(4 * visual, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2 * side, 2 * side]]),
    }


def run(contexts: list[int], budget: float, repeats: int, names: list[str] | None) -> list[dict[str, Any]]:
    decoder = model()
    rows = []
    for context in contexts:
        prompt = inputs(context)
        visual = int((prompt["input_ids"] == IMAGE_TOKEN).sum())
        chosen = at_budget(budget, context)
        del chosen["full"]
        chosen["fastv"] = methods.get("fastv", layer=1)  # two layers leave its default, 2, no later layer
        chosen["hae (drop_hidden_states)"] = methods.get(
            "hae", ddes=False, target_visual_tokens=visual // 4, drop_hidden_states=True
        )
        if names:
            chosen = {name: method for name, method in chosen.items() if name in names}
        own: dict[str, float] = {}

        def plain(prompt: Any = prompt) -> None:
            decoder(**prompt, use_cache=True, logits_to_keep=1)

        def compressed(name: str, method: Any, prompt: Any = prompt, own: Any = own) -> None:
            with foveakv.compress(decoder, method), _own_time() as spent:
                decoder(**prompt, use_cache=True, logits_to_keep=1)
            own[name] = spent[0]

        sides: dict[str, Any] = {"plain": plain}
        for name, method in chosen.items():
            sides[name] = lambda name=name, method=method: compressed(name, method)
        with torch.inference_mode():
            seconds = in_turns(sides, repeats, warmup=0 if context > 4096 else 1)
        base = spread(seconds["plain"])["median"]
        for name, times in seconds.items():
            measured = spread(times)
            rows.append(
                {
                    "context": context,
                    "method": name,
                    "ms": measured,
                    "wall_over_plain": measured["median"] / base,
                    "own_work_share": own.get(name, 0.0) * 1e3 / base,
                }
            )
    return rows


class _own_time:
    """Sums the seconds spent in the library's work after each layer's dense attention."""

    def __enter__(self) -> list[float]:
        self.spent = [0.0]
        self.original = CompressedLayer.end_prefill
        original, spent = self.original, self.spent

        def timed(layer: Any, *args: Any) -> None:
            start = time.perf_counter()
            original(layer, *args)
            spent[0] += time.perf_counter() - start

        CompressedLayer.end_prefill = timed  # type: ignore[method-assign]
        return self.spent

    def __exit__(self, *unused: object) -> None:
        CompressedLayer.end_prefill = self.original  # type: ignore[method-assign]
