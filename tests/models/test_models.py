"""`load`: local folders of tiny models, with and without a video processor, and what it says when there is nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import tiny_folder
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from transformers.utils import is_torchvision_available

from foveakv.errors import MissingDependencyError, ModelLoadError
from foveakv.models.loading import DEMO, KNOWN, Loaded, load

QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
QWEN_TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)


def save_qwen(folder: Path) -> Path:
    """A tiny Qwen2.5-VL as on the hub: a picture processor's settings, and a processor class that wants a video one."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = families.build("qwen2_5_vl")
    model.save_pretrained(folder)
    config, vision = model.config, model.config.vision_config
    ids = (config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id)
    state = json.loads(tiny_folder.tokenizer().backend_tokenizer.to_str())
    names = {number: name for name, number in state["model"]["vocab"].items()}
    for name, number in zip(QWEN_TOKENS, ids, strict=True):
        del state["model"]["vocab"][names[number]]
        state["model"]["vocab"][name] = number
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] not in ids]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        pad_token="<pad>",
        eos_token="</s>",
        additional_special_tokens=list(QWEN_TOKENS),
        chat_template=QWEN_TEMPLATE,
    ).save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
    ).save_pretrained(folder)
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"processor_class": "Qwen2_5_VLProcessor"}))
    return folder


def ask(loaded: Loaded, text: str, **pictures: Any) -> torch.Tensor:
    inputs = loaded.processor(text=[text], return_tensors="pt", **pictures)
    return loaded.model.generate(**inputs, max_new_tokens=3, do_sample=False)


def test_a_folder_with_a_llava(tmp_path: Path) -> None:
    loaded = load(tiny_folder.save(tmp_path))
    assert type(loaded.model).__name__ == "LlavaForConditionalGeneration"
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    assert ask(loaded, "what is <image>?", images=[Image.new("RGB", (40, 40))]).shape[0] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_by_name_or_object(tmp_path: Path, dtype: Any) -> None:
    assert load(tiny_folder.save(tmp_path), dtype=dtype, device="cpu").model.dtype == torch.bfloat16


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="unknown dtype 'float33'"):
        load(tiny_folder.save(tmp_path), dtype="float33")


def test_qwen_reads_pictures_without_torchvision(tmp_path: Path) -> None:
    loaded = load(save_qwen(tmp_path))
    assert type(loaded.processor).__name__ == "Qwen2_5_VLProcessor"
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    text = loaded.processor.apply_chat_template([message], add_generation_prompt=True)
    inputs = loaded.processor(text=[text], images=[Image.new("RGB", (56, 56))], return_tensors="pt")
    assert (inputs["input_ids"] == loaded.model.config.image_token_id).sum() == 4
    assert ask(loaded, text, images=[Image.new("RGB", (56, 56))]).shape[0] == 1


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed, so videos work")
def test_a_video_says_that_it_needs_torchvision(tmp_path: Path) -> None:
    loaded = load(save_qwen(tmp_path))
    with pytest.raises(MissingDependencyError, match="pip install torchvision"):
        loaded.processor(text=["x"], videos=[[Image.new("RGB", (56, 56))] * 2])


def test_a_text_model_comes_with_its_tokenizer(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny_folder.tokenizer().save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert ask(loaded, "hello").shape[0] == 1


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c"])
def test_a_missing_folder(name: str) -> None:
    with pytest.raises(ModelLoadError, match="there is no folder"):
        load(name)


def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="cannot load no-such-owner/no-such-model"):
        load("no-such-owner/no-such-model", cache_dir=tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    tiny_folder.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="Check that the folder is complete"):
        load(tmp_path)


def test_truncated_weights(tmp_path: Path) -> None:
    tiny_folder.save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="cannot load"):
        load(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot load"):
        load(tmp_path)


def test_remote_code_stays_off(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        load(tmp_path)


def test_known_models() -> None:
    assert KNOWN[0].name == DEMO
    assert len({model.name for model in KNOWN}) == len(KNOWN)
    assert all(model.what and model.needs and model.size > 0 for model in KNOWN)
