"""Tiny vision-language checkpoints with random weights and an own tokenizer, as folders that vLLM can load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from foveakv.engines.vllm import tiny_llava

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
CORPUS = [
    "a photo of a cat on a mat. what is in the image? describe both images, and compare them in one sentence."
] * 50
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if 'image' in c['type'] %}IMAGE{% elif 'text' in c %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}  # fmt: skip
BUILD: dict[str, Callable[[Path], None]] = {}


def image_text(name: str) -> str:
    """Return the text that stands for one image in a prompt."""
    return tiny_llava.IMAGE if "llava" in name else QWEN_IMAGE


def checkpoint(name: str, folder: Path) -> Path:
    """Return the folder of a checkpoint, which is made on the first call."""
    path = folder / name
    if not (path / "done").exists():
        torch.manual_seed(0)
        BUILD[name](path)
        (path / "done").touch()
    return path


def _register(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(function: Callable[[Path], None]) -> Callable[[Path], None]:
        BUILD[name] = function
        return function

    return add


def _tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _ids(tokenizer: PreTrainedTokenizerFast, **names: str) -> dict[str, int]:
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _sharpen(model: Any) -> None:
    """Scale queries and keys, so that attention is not uniform and what is evicted matters."""
    for name, parameter in model.named_parameters():
        if ("q_proj.weight" in name or "k_proj.weight" in name) and "vis" not in name:
            parameter.data *= 8


def _save(model: Any, processor: Any, path: Path, eos: int) -> None:
    _sharpen(model)
    model.generation_config.eos_token_id = eos
    model.float().eval().save_pretrained(path)
    processor.save_pretrained(path)


def _qwen_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    return _ids(
        tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>",
    )  # fmt: skip


@_register("tiny-qwen2_5-vl")
def _qwen2_5(path: Path) -> None:
    tokenizer = _tokenizer()
    ids, ends = _qwen_ids(tokenizer), _ids(tokenizer, eos_token_id="<|im_end|>", pad_token_id="<|endoftext|>")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    text = {**TEXT, **ends, "vocab_size": len(tokenizer), "num_key_value_heads": 2, "rope_parameters": rope,
            "use_sliding_window": False, "bos_token_id": ends["pad_token_id"]}  # fmt: skip
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128,
              "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
              "fullatt_block_indexes": [1]}  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=4 * 28 * 28, max_pixels=256 * 28 * 28),
        tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE.replace("IMAGE", QWEN_IMAGE),
    )  # fmt: skip
    _save(model, processor, path, ends["eos_token_id"])


@_register("tiny-qwen3-vl")
def _qwen3(path: Path) -> None:
    tokenizer = _tokenizer()
    ids, ends = _qwen_ids(tokenizer), _ids(tokenizer, eos_token_id="<|im_end|>", pad_token_id="<|endoftext|>")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {**TEXT, **ends, "vocab_size": len(tokenizer), "num_key_value_heads": 2, "head_dim": 32,
            "rope_parameters": rope}  # fmt: skip
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128,
              "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 256,
              "deepstack_visual_indexes": [0]}  # fmt: skip
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **ids))
    images = Qwen2VLImageProcessor(
        min_pixels=4 * 32 * 32, max_pixels=256 * 32 * 32, patch_size=16, merge_size=2, temporal_patch_size=2,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    processor = Qwen3VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE.replace("IMAGE", QWEN_IMAGE),
    )  # fmt: skip
    _save(model, processor, path, ends["eos_token_id"])


@_register("tiny-llava")
def _llava(path: Path) -> None:
    tiny_llava.build(path)
