"""Calibration files are found by the same digest in vLLM, from the checkpoint, and in transformers, from the model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import pytest

from foveakv.engines.transformers.fingerprint import digest_of
from foveakv.engines.vllm.model_facts import facts_of
from foveakv.errors import MethodError


def model_config(model: Any, path: Path | str) -> Any:
    return SimpleNamespace(hf_text_config=model.config.get_text_config(), model=str(path), revision=None)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl"])
def test_digests_are_equal(name: str, tmp_path: Path) -> None:
    model = families.build(name)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    facts = facts_of(model_config(model, tmp_path), 3)
    assert facts.layers == (0, 1, 2)
    assert facts.digest() == digest_of(model)


def test_models_that_cannot_be_identified_are_an_error(tmp_path: Path) -> None:
    model = families.build("llava")
    for path in (tmp_path, "nobody/no-such-model"):
        with pytest.raises(MethodError, match="score_layer=16"):
            facts_of(model_config(model, path), 3).digest()
