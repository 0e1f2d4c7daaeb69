"""A tiny LLaVA with tokenizer and processor, saved to a folder that `foveakv.load` and the command line can open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ': ' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> Any:
    """Every byte is a token at the ids of `families.TEXT_IDS`; the special tokens are where `families` has them."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": families.PAD, "<s>": families.BOS, "</s>": families.EOS, "<image>": families.IMAGE}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary |= {letter: families.TEXT_IDS.start + i for i, letter in enumerate(letters)}
    free = iter(set(range(families.VOCABULARY)) - set(vocabulary.values()))
    vocabulary |= {f"<free{i}>": i for i in free}
    byte_level = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<image>"]}
    return PreTrainedTokenizerFast(tokenizer_object=byte_level, **special)


def processor(chat: bool = False) -> Any:
    import transformers

    try:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as ImageProcessor
    except ImportError:
        from transformers import CLIPImageProcessor as ImageProcessor
    size = families.FAMILIES["llava"].config().vision_config.image_size
    images = ImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    return transformers.LlavaProcessor(
        images,
        tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def save(folder: Path, chat: bool = False) -> Path:
    families.build("llava").save_pretrained(folder)
    processor(chat).save_pretrained(folder)
    return folder


def picture(seed: int = 0, size: tuple[int, int] = (70, 60)) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


def pictures(folder: Path, count: int) -> list[Path]:
    """`count` picture files."""
    files = []
    for i in range(count):
        files.append(folder / f"picture{i}.png")
        picture(i).save(files[-1])
    return files
