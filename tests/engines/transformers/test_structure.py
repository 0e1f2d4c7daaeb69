"""Models that nobody has tested: each gives what it gives without compression, or is refused by name when attached."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
import transformers as hf
from masked_reference import largest_difference
from transformers.models.auto import modeling_auto as auto

import foveakv
from foveakv import errors
from foveakv.engines.transformers import probe

pytestmark = pytest.mark.usefixtures("no_gradients")

TYPES = sorted({**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
# Settings that make a model of almost any family tiny; a config takes those that it has.
TINY: dict[str, Any] = {
    "vocab_size": 300, "max_position_embeddings": 512, "n_positions": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64, "hidden_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "d_ff": 96, "ffn_hidden_size": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "expert_intermediate_size": 32,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
    "depth": 2, "image_size": 32, "patch_size": 16,
}  # fmt: skip
# Without these settings where a family cannot be built or run with them.
LEFT_OUT = [(), ("head_dim",), ("num_key_value_heads",), ("head_dim", "num_key_value_heads")]
LARGEST = 6_000_000
CALL: dict[str, Any] = {
    "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True
}  # fmt: skip


def tiny(config_class: Any, left_out: tuple[str, ...]) -> Any:
    """A tiny config of a class, its sub-configs included."""
    default = config_class()
    settings: dict[str, Any] = {
        name: value for name, value in TINY.items() if getattr(default, name, None) is not None and name not in left_out
    }
    for name, sub_class in config_class.sub_configs.items():
        sub = getattr(default, name, None)
        if sub is not None and hasattr(sub_class, "sub_configs"):
            settings[name] = tiny(type(sub), left_out).to_dict()
    if getattr(default, "layer_types", None):
        settings["layer_types"] = list(default.layer_types)[:4]
    return config_class(**settings)


def build(model_type: str) -> tuple[Any, Any]:
    """A tiny model of the family and what it generates; skips the test where that does not work."""
    name = {**auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}[model_type]
    model_class = getattr(hf, name)
    ids = torch.randint(10, 280, (1, 12))
    for left_out in LEFT_OUT:
        with contextlib.suppress(Exception):
            config = tiny(model_class.config_class, left_out)
            with torch.device("meta"):
                numbers = sum(parameter.numel() for parameter in model_class(config).parameters())
            if numbers > LARGEST:
                continue
            torch.manual_seed(0)
            model = model_class(config).eval()
            return model, (ids, model.generate(ids, **CALL).logits)
    pytest.skip("no tiny model of this family can be made and run with these settings")


def check(model_type: str) -> str | None:
    """Compares the full cache with the plain model's; returns the reason where the model is refused."""
    model, (ids, want) = build(model_type)
    try:
        with foveakv.compress(model, foveakv.Full()):
            got = model.generate(ids, **CALL).logits
    except errors.UnsupportedModelError as error:
        assert "generate" not in vars(model)
        return str(error)
    assert largest_difference(got, want) < 1e-4
    return None


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_equal_or_refused(model_type: str) -> None:
    check(model_type)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("diffllama", r"DiffLlamaForCausalLM is not supported: the attention of layer 0 computes with .*\(chunk\)"),
        ("deepseek_v3", r"DeepseekV3ForCausalLM is not supported: the attention of layer 0 computes with .*\(shape\)"),
        ("doge", "DogeForCausalLM is not supported: the attention of layer 0 computes with"),
        ("jetmoe", "JetMoeForCausalLM is not supported: the attention of layer 0 computes with"),
        ("minimax", "MiniMaxForCausalLM is not supported: it needs a cache class of its own"),
        ("gpt2", "no text decoder with a list of layers"),
        ("gpt_oss", "`s_aux`"),
    ],
)
def test_the_reason_is_given(model_type: str, reason: str) -> None:
    message = check(model_type)
    assert message is not None
    assert re.search(reason, message), message


@pytest.mark.parametrize("model_type", ["gemma", "granite", "olmo2", "starcoder2", "qwen3_moe", "lfm2", "opt"])
def test_other_families_are_taken(model_type: str) -> None:
    assert check(model_type) is None


def test_a_layer_that_shares_anothers_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The structure is tried out without the model's weights, once for each config."""
    config = tiny(hf.GraniteConfig, ())
    model = hf.GraniteForCausalLM(config).eval()
    forward = hf.models.granite.modeling_granite.GraniteAttention.forward

    def shared(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == 3:
            kwargs = {name: value for name, value in kwargs.items() if name not in ("cache", "past_key_values")}
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(hf.models.granite.modeling_granite.GraniteAttention, "forward", shared)
    monkeypatch.setattr(probe, "_found", {})
    for make in (foveakv.cache_for, lambda *args: foveakv.compress(*args).__enter__()):
        with pytest.raises(errors.UnsupportedModelError, match="layer 3 stores no keys and values of its own"):
            make(model, foveakv.Full())
    assert "generate" not in vars(model)


def test_what_the_trial_cannot_run_is_an_error_of_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(hf.DiffLlamaConfig, ())
    model = hf.DiffLlamaForCausalLM(config).eval()
    monkeypatch.setattr(probe, "check", lambda model: None)
    with (
        foveakv.compress(model, foveakv.Full()),
        pytest.raises(errors.UnsupportedModelError, match=r"DiffLlamaForCausalLM .*\(chunk\)"),
    ):
        model(torch.ones(1, 3, dtype=torch.long))
