"""The digest that identifies a model, and what methods are told of it."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import families
import pytest
import torch

import foveakv
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.fingerprint import digest_of, facts_of
from foveakv.errors import MethodError
from foveakv.methods import Method, ModelFacts


def test_the_digest_is_that_of_the_weights_in_bfloat16() -> None:
    model = copy.deepcopy(families.build("llava"))
    model.to(torch.bfloat16)
    digest = digest_of(model)
    assert len(digest) == 64
    assert digest_of(copy.deepcopy(model)) == digest
    assert digest_of(model.to(torch.float32)) == digest
    with torch.no_grad():
        weight = next(compat.decoder_of(model).layers[1].parameters())
        weight.view(-1)[0] += 1
    assert digest_of(model) != digest


def test_families_have_digests_of_their_own() -> None:
    digests = {name: digest_of(families.build(name)) for name in ("llava", "qwen2_vl", "qwen3_vl")}
    assert len(set(digests.values())) == len(digests)


@dataclass
class _Told(Method):
    """Records what it is told, and keeps everything."""

    name: ClassVar[str] = "told"
    refuse: bool = False

    def for_model(self, model: ModelFacts) -> Method:
        if self.refuse:
            raise MethodError("told: not for this model")
        made = copy.copy(self)
        made.facts = model  # type: ignore[attr-defined]
        return made


def test_methods_are_told_of_the_model_before_the_first_prompt() -> None:
    model, inputs = families.build("llava"), families.prompt("llava")
    given = _Told()
    method: Any = foveakv.cache_for(model, given).method
    assert method is not given
    assert method.facts.layers == facts_of(model).layers == tuple(range(len(compat.decoder_of(model).layers)))
    assert method.facts.digest() == digest_of(model)
    with foveakv.compress(model, given) as session:
        session.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert session.method is given
        assert isinstance(session.cache.method, _Told)
        assert session.cache.method is not given
    for attach in (foveakv.cache_for, lambda *pair: foveakv.compress(*pair).__enter__()):
        with pytest.raises(MethodError, match="not for this model"):
            attach(model, _Told(refuse=True))
