"""Bad input: every mistake has its own error that says what to do, and nothing is lost by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import tiny_folder
import torch
import transformers

import foveakv
from foveakv import methods
from foveakv.core.budget import parse_budget
from foveakv.engines.transformers.api import compress
from foveakv.errors import (
    BudgetError,
    CacheInUseError,
    FoveaKVError,
    InputError,
    MethodError,
    NoVisualTokensError,
    UnsupportedModeError,
    UnsupportedModelError,
)
from foveakv.models.inputs import build_inputs

BUDGETED = [
    "adakv",
    "h2o",
    "hae",
    "hybridkv",
    "lookm",
    "mixkv",
    "prefixkv",
    "pyramidkv",
    "quest",
    "random",
    "snapkv",
    "sparsemm",
    "streaming",
    "vlcache",
]


@pytest.fixture(scope="module")
def model() -> Any:
    return families.build("llava", dtype=torch.float64)


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return families.prompt("llava", images=2, dtype=torch.float64)


@pytest.fixture
def unharmed(model: Any, inputs: dict[str, Any]) -> Any:
    """After the test the model gives what it gave before, plain and compressed, and carries nothing of ours."""
    with compress(model, methods.get("snapkv", budget=0.5, window=8)):
        compressed = model.generate(**inputs, max_new_tokens=4)
    plain = model.generate(**inputs, max_new_tokens=4)
    yield
    assert torch.equal(model.generate(**inputs, max_new_tokens=4), plain)
    assert "generate" not in vars(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with compress(model, methods.get("snapkv", budget=0.5, window=8)):
        assert torch.equal(model.generate(**inputs, max_new_tokens=4), compressed)


# ---- budgets


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize(
    "budget", [0, 0.0, -0.1, -5, 1.5, "0", "0%", "150%", "-3", "many", "5 parsecs", "0MiB", float("nan"), True]
)
def test_budgets_that_cannot_be(name: str, budget: Any) -> None:
    with pytest.raises(BudgetError, match=r"budget|over 100%"):
        methods.get(name, budget=budget)


@pytest.mark.parametrize(("budget", "message"), [
    (0, "keeps nothing"),
    (-0.5, "keeps nothing"),
    (1.5, "over 100%; write 1.0 for everything or an integer for tokens"),
    ("12XB", "unknown unit"),
    ("much", "cannot be read"),
])  # fmt: skip
def test_budget_errors_say_what_to_write(budget: Any, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        parse_budget(budget)


# ---- methods and options


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(MethodError, match=r"unknown method 'hybrydkv' \(did you mean 'hybridkv'\?\); known: adakv, "):
        methods.get("hybrydkv")


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(MethodError, match=r"hybridkv has no option 'tehta' \(did you mean 'theta'\?\)"):
        methods.get("hybridkv", tehta=0.9)


def test_a_class_or_a_name_is_not_a_method(model: Any) -> None:
    for wrong in ("snapkv", methods.find("snapkv"), None):
        with pytest.raises(MethodError, match="expected a method such as"):
            compress(model, wrong)


@pytest.mark.parametrize(("name", "options"), [
    ("hybridkv", {"theta": 2.0}),
    ("hybridkv", {"classify": "sometimes"}),
    ("hae", {"recycle_bin_size": 0}),
    ("hae", {"mode": "guess"}),
    ("hae", {"dap": False, "ddes": False}),
    ("h2o", {"heavy_ratio": 1.5}),
    ("snapkv", {"window": 0}),
    ("adakv", {"floor": -1}),
    ("pyramidkv", {"beta": 0}),
    ("sparsemm", {"ratio": 1.1}),
    ("mixkv", {"intrinsic": "norm"}),
    ("quest", {"page_size": 0}),
    ("fastv", {"ratio": 0.0}),
    ("mustdrop", {"layers": "two"}),
    ("lookm", {"merge": "sum"}),
    ("vlcache", {"threshold": 2}),
    ("prefixkv", {"sink": -1}),
])  # fmt: skip
def test_options_that_make_no_sense(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=name):
        methods.get(name, **options)


# ---- prompts and pictures


@pytest.mark.parametrize("name", ["random", "fastv", "mustdrop"])
def test_no_image_in_the_prompt(model: Any, unharmed: None, name: str) -> None:
    text = families.prompt("llava", images=0)
    with (
        compress(model, methods.get(name)),
        pytest.raises(NoVisualTokensError, match=f"{name} evicts visual tokens only"),
    ):
        model.generate(**text, max_new_tokens=3)


def test_missing_and_corrupt_pictures_are_named(tmp_path: Path) -> None:
    processor = tiny_folder.processor()
    with pytest.raises(InputError, match=r"not found: .*gone\.png"):
        build_inputs(processor, "What?", [tmp_path / "gone.png"])
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 50)
    with pytest.raises(InputError, match=r"bad\.png"):
        build_inputs(processor, "What?", [bad])


def test_more_image_tokens_than_pixels(model: Any, unharmed: None, inputs: dict[str, Any]) -> None:
    """transformers itself checks this; the error must reach the user, and the session must stay usable."""
    short = {**inputs, "pixel_values": inputs["pixel_values"][:1]}
    with compress(model, methods.get("snapkv", budget=0.5, window=8)) as session:
        with pytest.raises(ValueError, match=r"(?i)image features and image tokens"):
            model.generate(**short, max_new_tokens=3)
        model.generate(**inputs, max_new_tokens=3)
        assert session.report.evicted > 0


# ---- models and generation modes


@pytest.mark.parametrize("name", ["paligemma", "mllama"])
def test_unsupported_family_gives_the_reason(name: str) -> None:
    other = families.build(name)
    with pytest.raises(UnsupportedModelError, match=r"is not supported: ..."):
        compress(other, methods.get("full")).__enter__()
    assert "generate" not in vars(other)


def test_encoder_decoder_and_strange_objects() -> None:
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError):
        compress(transformers.T5ForConditionalGeneration(config), methods.get("full")).__enter__()
    with pytest.raises(UnsupportedModelError, match="expected a transformers model, got Linear"):
        compress(torch.nn.Linear(2, 2), methods.get("full")).__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "message"), [
    ({"use_cache": False}, "use_cache=False"),
    ({"cache_implementation": "static"}, "cache_implementation"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ({"custom_generate": "somewhere/else"}, "custom_generate"),
])  # fmt: skip
def test_unsupported_generation_modes(
    model: Any, unharmed: None, inputs: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with (
        compress(model, methods.get("snapkv", budget=0.5, window=8)),
        pytest.raises(UnsupportedModeError, match=message),
    ):
        model.generate(**inputs, max_new_tokens=3, **options)


@pytest.mark.parametrize("name", ["h2o", "hae"])
def test_assisted_decoding_with_a_method_that_evicts_while_decoding(
    model: Any, unharmed: None, inputs: dict[str, Any], name: str
) -> None:
    with (
        compress(model, methods.get(name, budget=0.5)),
        pytest.raises(UnsupportedModeError, match=f"{name} evicts while decoding"),
    ):
        model.generate(**inputs, max_new_tokens=3, prompt_lookup_num_tokens=2)


def test_one_method_object_on_two_models(model: Any, unharmed: None, inputs: dict[str, Any]) -> None:
    other, method = families.build("llava", seed=1), methods.get("snapkv", budget=0.5, window=8)
    with compress(model, method):
        with pytest.raises(CacheInUseError, match="in use on another model; make a second one"):
            compress(other, method).__enter__()
        model.generate(**inputs, max_new_tokens=3)
    with compress(other, method):  # one after the other is fine
        other.generate(**inputs, max_new_tokens=3)


def test_one_cache_on_two_models(model: Any, unharmed: None, inputs: dict[str, Any]) -> None:
    other = families.build("llava", seed=1)
    cache = foveakv.cache_for(model, methods.get("full"))
    theirs = foveakv.cache_for(other, methods.get("full"))
    with pytest.raises(CacheInUseError, match="made for another model"):
        other.generate(**inputs, max_new_tokens=3, past_key_values=cache)
    del cache, theirs


def test_nothing_generated_yet(model: Any, unharmed: None) -> None:
    with compress(model, methods.get("full")) as session:
        for read in (lambda: session.report, lambda: session.kept(0), lambda: session.trace):
            with pytest.raises(CacheInUseError):
                read()


def test_all_errors_have_one_base() -> None:
    kinds: list[type[Exception]] = [
        BudgetError, CacheInUseError, InputError, MethodError, NoVisualTokensError,
        UnsupportedModelError, UnsupportedModeError,
    ]  # fmt: skip
    assert all(issubclass(kind, FoveaKVError) for kind in kinds)
    assert issubclass(BudgetError, ValueError)


# ---- remote code


def test_remote_code_is_never_run_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every from_pretrained call gets trust_remote_code=False, and True only when the user passes it."""
    folder = tiny_folder.save(tmp_path / "model")
    seen: list[Any] = []
    for owner in (transformers.AutoConfig, transformers.AutoProcessor, transformers.AutoModelForImageTextToText):
        monkeypatch.setattr(owner, "from_pretrained", _watched(owner.from_pretrained, seen))
    foveakv.load(str(folder))
    assert seen
    assert not any(seen)
    seen.clear()
    foveakv.load(str(folder), trust_remote_code=True)
    assert any(seen)


def _watched(original: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("trust_remote_code", False))
        return original(*args, **kwargs)

    return from_pretrained
