"""Generation modes that cannot be combined with compression raise an error, and the model still works after it."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
import transformers
from masked_reference import largest_difference
from modes import GROWING, METHODS, inputs_of

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")


def refused(name: str, match: str, family: str = "llama", **options: Any) -> None:
    """The call raises, and leaves a model that still works inside the same block and after it."""
    model, inputs = matrix.model(family), inputs_of(family, torch.float32)
    with foveakv.compress(model, matrix.method(name)):
        with pytest.raises(errors.UnsupportedModeError, match=match):
            model.generate(**inputs, max_new_tokens=4, **options)
        model.generate(**inputs, max_new_tokens=2)
    before = matrix.plain_batch(family)
    assert largest_difference(matrix.plain(model, inputs, follow=before).logits, before.logits) < 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_no_cache_to_compress(name: str) -> None:
    refused(name, "use_cache=False", use_cache=False)
    refused(name, "use_cache=False", generation_config=transformers.GenerationConfig(use_cache=False))
    model, inputs = matrix.model("llava"), families.prompt("llava")
    with foveakv.compress(model, matrix.method(name)):
        with pytest.raises(errors.UnsupportedModeError, match="use_cache=False"):
            model(**inputs, use_cache=False)
        model(**inputs)


@pytest.mark.parametrize("name", GROWING)
def test_assisted_decoding_with_eviction_while_decoding(name: str) -> None:
    refused(name, f"{name}.*(snapkv|without an assistant)", prompt_lookup_num_tokens=3)
    refused(name, f"{name}.*(snapkv|without an assistant)", assistant_model=families.build("llama", seed=9))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("contrastive", {"penalty_alpha": 0.6, "top_k": 4}),
        ("static", {"cache_implementation": "static"}),
        ("quantized", {"cache_implementation": "quantized"}),
        ("offloaded", {"cache_implementation": "offloaded"}),
        ("custom_generate", {"custom_generate": "someone/something"}),
        ("output_attentions", {"output_attentions": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_modes_that_do_not_go_together_with_compression(name: str, match: str, options: dict[str, Any]) -> None:
    refused(name, match, **options)


def test_somebody_elses_filled_cache() -> None:
    model, inputs = matrix.model("llama"), families.prompt("llama")
    filled = matrix.plain(model, inputs).cache
    ids = torch.cat([inputs["input_ids"], torch.full((1, 8), 50)], 1)
    with (
        foveakv.compress(model, matrix.method("snapkv")),
        pytest.raises(errors.UnsupportedModeError, match="DynamicCache"),
    ):
        model.generate(input_ids=ids, past_key_values=filled, max_new_tokens=2)
    static = transformers.StaticCache(config=model.config, max_cache_len=100)
    with (
        foveakv.compress(model, matrix.method("snapkv")),
        pytest.raises(errors.UnsupportedModeError, match="StaticCache"),
    ):
        model.generate(**inputs, past_key_values=static, max_new_tokens=2)


@pytest.mark.parametrize("how", ["generate", "by hand"])
def test_an_empty_cache_of_ones_own_is_not_lost_silently(how: str) -> None:
    """A user's own DynamicCache either ends up holding the context or is refused: a second turn would start anew."""
    model, inputs = matrix.model("llama"), families.prompt("llama")
    mine = transformers.DynamicCache()
    with foveakv.compress(model, matrix.method("snapkv")):
        try:
            if how == "generate":
                model.generate(**inputs, past_key_values=mine, max_new_tokens=2)
            else:
                model(**inputs, **{matrix.cache_argument("llama"): mine})
        except errors.UnsupportedModeError:
            return
    assert mine.get_seq_length() > 0


def test_continuing_with_another_number_of_sequences() -> None:
    model = matrix.model("llama")
    one, three = families.prompt("llama"), inputs_of("llama", torch.float32)
    with foveakv.compress(model, matrix.method("snapkv")):
        cache = matrix.cache_of(model.generate(**one, **matrix.GREEDY))
        with pytest.raises(errors.CacheInUseError, match="1 sequences"):
            model(input_ids=three["input_ids"][:, -2:], **{matrix.cache_argument("llama"): cache})
