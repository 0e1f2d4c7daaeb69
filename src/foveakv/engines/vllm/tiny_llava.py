"""A tiny LLaVA with random weights and a tokenizer of its own, as a folder that vLLM can load; for self-tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

IMAGE = "<image>\n"
"""The text that stands for an image."""
IMAGE_SIZE, PATCH = 140, 14
_SPECIAL = ["<|endoftext|>", "<|end|>", "<image>", "<pad>"]
_CORPUS = ["a photo of a cat on a mat. what is in the image? describe both images, and compare them."] * 50
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if 'image' in c['type'] %}<image>\n{% elif 'text' in c %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def build(folder: Path) -> Path:
    """Write the model to a folder (4 MB): 4 layers, 4 heads, 100 tokens per image. Returns the folder."""
    import torch
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    torch.manual_seed(0)
    tokenizer = _tokenizer()
    ids = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids(_SPECIAL), strict=True))
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|end|>"], "pad_token_id": ids["<pad>"],
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": IMAGE_SIZE, "patch_size": PATCH, "projection_dim": 64,
    }  # fmt: skip
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=ids["<image>"], image_token_id=ids["<image>"],
        vision_feature_layer=-2, vision_feature_select_strategy="default", image_seq_length=(IMAGE_SIZE // PATCH) ** 2,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config).float().eval()
    for name, parameter in model.named_parameters():
        if "language" in name and name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 8  # attention that is not uniform, so that it matters what is evicted
    model.generation_config.eos_token_id = ids["<|end|>"]
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=size), tokenizer=tokenizer,
        patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )  # fmt: skip
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    _rename_vision_weights(folder / "model.safetensors")
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {
        "vocab_size": 400,
        "special_tokens": _SPECIAL,
        "initial_alphabet": letters,
        "show_progress": False,
    }
    made.train_from_iterator(_CORPUS, trainers.BpeTrainer(**options))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<pad>")


def _rename_vision_weights(file: Path) -> None:
    """vLLM 0.32 expects the names that transformers 4 gave the weights of the vision tower."""
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    if not any(".vision_model." in name for name in weights):
        weights = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in weights.items()}
        save_file(weights, file, metadata={"format": "pt"})
