"""The model and the measurement of both sides of the kvpress benchmark; imports torch and transformers only.

The scripts in this folder import it by its plain name, because kvpress' environment does not contain FoveaKV.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

SIZES: dict[str, dict[str, int]] = {
    # Attention of Qwen2.5-7B with a narrower MLP: a prompt of 8k tokens is read in seconds, not minutes.
    "qwen2.5-7b-text": {
        "hidden_size": 3584,
        "intermediate_size": 4864,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Step = Callable[[torch.Tensor, torch.Tensor], Any]  # ids and positions [1, n] -> logits [1, n, vocabulary]


def build(spec: dict[str, Any], attention: str = "sdpa") -> Any:
    """A LlamaForCausalLM with random weights, the same ones in every process."""
    config = transformers.LlamaConfig(
        **SIZES[spec["sizes"]],
        vocab_size=1000,
        num_hidden_layers=spec["layers"],
        max_position_embeddings=131072,
        attn_implementation=attention,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to(DTYPES[spec["dtype"]]).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(spec["seed"])
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.uniform_(-0.03, 0.03, generator=generator)
    for module in model.modules():
        if "inv_freq" in dict(module.named_buffers(recurse=False)):  # computed in the constructor, lost on meta
            for name, buffer in type(module)(config).named_buffers(recurse=False):
                setattr(module, name, buffer)
    return model.eval()


def prompt(spec: dict[str, Any]) -> torch.Tensor:
    """Random ids: LongTensor [1, context]."""
    generator = torch.Generator().manual_seed(spec["seed"] + 1)
    return torch.randint(10, 900, (1, spec["context"]), generator=generator)


def decode(step: Step, logits: torch.Tensor, position: int, tokens: int) -> list[float]:
    """Run greedy steps after a prompt; return the milliseconds of each, without the first two (warm-up)."""
    seconds = []
    token = logits[:, -1:].argmax(-1)
    for i in range(tokens + 2):
        start = time.perf_counter()
        token = step(token, torch.tensor([[position + i]]))[:, -1:].argmax(-1)
        seconds.append(time.perf_counter() - start)
    return [1e3 * value for value in seconds[2:]]


def storage(cache: Any) -> int:
    """Bytes of a transformers cache's tensors, each storage once."""
    tensors = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def main(measure: Callable[[dict[str, Any]], list[dict[str, Any]]], versions: dict[str, str]) -> None:
    """Read the spec from the command line and print one JSON line."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    with torch.inference_mode():
        rows = measure(spec)
    print(json.dumps({"rows": rows, "versions": versions}))
