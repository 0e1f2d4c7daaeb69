"""Read the packaged ONNX and GGUF weights as tensors under Hugging Face's names.

The two weight packages are never imported and none of their code runs: their files are only read, with `onnx` and
`gguf`, which are imported on use.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IMAGE_TOKEN = "<image>"
SPARE_TOKEN = "<reponame>"  # id 4 of SmolLM2's vocabulary, which does not occur in text; renamed to <image>

VISION_CONFIG: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 518,
    "patch_size": 14,
}

_BLOCK_NAMES = {  # GGUF block tensor -> Llama layer tensor
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def vision_state(onnx_file: Path) -> dict[str, torch.Tensor]:
    """Read DINOv2-small's weights from the saliency network that contains it, under transformers 4 names.

    The exporter kept the names of biases and norms. Linear weights are anonymous and transposed; the MatMul node that
    reads one carries its module's path. The position embedding was split into the CLS part and the 37 x 37 patches.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(onnx_file)).graph
    arrays = {item.name: torch.from_numpy(numpy_helper.to_array(item).copy()) for item in graph.initializer}
    state = {name.removeprefix("backbone."): a for name, a in arrays.items() if name.startswith("backbone.")}
    for node in graph.node:
        if node.op_type != "MatMul" or not node.name.startswith("/backbone/"):
            continue
        for name in node.input:
            if name in arrays:
                module = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
                state[f"{module}.weight"] = arrays[name].T.contiguous()
    cls, grid = (next(a for n, a in arrays.items() if n.startswith(f"onnx::{op}_")) for op in ("Concat", "Reshape"))
    state["embeddings.position_embeddings"] = torch.cat([cls, grid], dim=1)  # [1, 1 + 37 * 37, 384]
    state["embeddings.mask_token"] = torch.zeros(1, VISION_CONFIG["hidden_size"])  # pre-training only, not exported
    return state


class TextFile:
    """SmolLM2's GGUF file. config: fields of `LlamaConfig`; heads, kv_heads: numbers of attention and KV heads."""

    def __init__(self, gguf_file: Path) -> None:
        from gguf import GGUFReader

        self.reader = GGUFReader(str(gguf_file))
        meta = self._meta
        self.heads, self.kv_heads = meta("llama.attention.head_count"), meta("llama.attention.head_count_kv")
        self.config: dict[str, Any] = {
            "vocab_size": meta("llama.vocab_size"),
            "hidden_size": meta("llama.embedding_length"),
            "intermediate_size": meta("llama.feed_forward_length"),
            "num_hidden_layers": meta("llama.block_count"),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": meta("llama.context_length"),
            "rms_norm_eps": round(meta("llama.attention.layer_norm_rms_epsilon"), 12),
            "rope_parameters": {"rope_type": "default", "rope_theta": meta("llama.rope.freq_base")},
            "bos_token_id": meta("tokenizer.ggml.bos_token_id"),
            "eos_token_id": meta("tokenizer.ggml.eos_token_id"),
            "pad_token_id": meta("tokenizer.ggml.padding_token_id"),
            "tie_word_embeddings": True,
        }

    def _meta(self, key: str) -> Any:
        return self.reader.fields[key].contents()

    def state(self) -> dict[str, torch.Tensor]:
        """Dequantized fp32 weights under LlamaModel's names (the output layer is tied to the embedding)."""
        from gguf.quants import dequantize

        state = {}
        for tensor in self.reader.tensors:
            weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            if tensor.name == "token_embd.weight":
                state["embed_tokens.weight"] = weight
            elif tensor.name == "output_norm.weight":
                state["norm.weight"] = weight
            elif match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name):
                layer, kind = match.groups()
                if kind in ("attn_q", "attn_k"):
                    weight = _split_rotary(weight, self.heads if kind == "attn_q" else self.kv_heads)
                state[f"layers.{layer}.{_BLOCK_NAMES[kind]}.weight"] = weight
        return state

    def tokenizer(self) -> Tokenizer:
        """A byte-level BPE tokenizer that splits digits, with `<image>` in place of an unused special token."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        names, kinds = self._meta("tokenizer.ggml.tokens"), self._meta("tokenizer.ggml.token_type")
        names = [IMAGE_TOKEN if name == SPARE_TOKEN else name for name in names]
        merges = [tuple(pair.split(" ")) for pair in self._meta("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        control = 3  # gguf.TokenType.CONTROL
        special = [
            AddedToken(n, special=True, normalized=False)
            for n, kind in zip(names, kinds, strict=True)
            if kind == control
        ]
        tokenizer.add_special_tokens(special)
        return tokenizer


def _split_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of the two rotary halves. weight: [heads * head_dim, hidden], as is the result."""
    rows, hidden = weight.shape
    return weight.view(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)
