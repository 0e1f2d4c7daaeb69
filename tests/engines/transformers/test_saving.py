"""Caches that are saved and loaded: the same state, for the same model, prompt and method, or a refusal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import families
import matrix
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import foveakv
from foveakv import errors
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.saving import NOT_SAVED
from foveakv.methods import Method, PrefillView, PromptView, State, registry

pytestmark = pytest.mark.usefixtures("no_gradients")

METHODS = [name for name in matrix.METHODS if not matrix.method(name).visual_only]


def start(family: str, method: Any, steps: int = 3, **options: Any) -> tuple[Any, dict[str, Any], CompressedCache]:
    """A model, its inputs, and a cache with the prompt and a few decoded tokens."""
    model, inputs = matrix.model(family, torch.float64), families.prompt(family, dtype=torch.float64)
    cache = foveakv.cache_for(model, method, saveable=True, **options)
    model(**inputs, **{matrix.cache_argument(family): cache})
    go_on(family, model, cache, steps, first=20)
    return model, inputs, cache


def go_on(family: str, model: Any, cache: CompressedCache, steps: int, first: int = 40) -> torch.Tensor:
    """Logits of a few forced tokens."""
    batch = cache.full_prompt.batch
    found = [
        model(input_ids=torch.full((batch, 1), first + step), **{matrix.cache_argument(family): cache}).logits
        for step in range(steps)
    ]
    return torch.cat(found, 1)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
@pytest.mark.parametrize("name", matrix.METHODS)
def test_a_loaded_cache_goes_on_as_the_saved_one(name: str, family: str, tmp_path: Path) -> None:
    model, inputs, cache = start(family, matrix.method(name))
    cache.save(tmp_path / "cache")
    loaded = foveakv.load_cache(tmp_path / "cache", model, inputs=inputs)
    assert torch.equal(loaded.token_ids, cache.token_ids)
    assert loaded.seen == cache.seen
    for layer in cache.compressed:
        assert torch.equal(loaded.kept(layer.layer_idx), cache.kept(layer.layer_idx))
    assert torch.equal(go_on(family, model, loaded, 6), go_on(family, model, cache, 6))
    assert foveakv.Report.of(loaded).evicted == foveakv.Report.of(cache).evicted


@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"kv_dtype": "int4", "residual_length": 4}, {"pool": True}])
@pytest.mark.parametrize("name", ["snapkv", "hae", "hybridkv", "adakv"])
def test_quantized_slots_and_pages(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    pool = foveakv.Pool() if options.pop("pool", False) else None
    model, inputs, cache = start("llava", matrix.method(name), **options, **({} if pool is None else {"pool": pool}))
    cache.save(tmp_path / "cache")
    other = None if pool is None else foveakv.Pool()
    loaded = foveakv.load_cache(tmp_path / "cache", model, inputs=inputs, pool=other)
    assert torch.equal(go_on("llava", model, loaded, 40), go_on("llava", model, cache, 40))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "llama", "qwen3_5"])
def test_other_layers_beams_and_padding(family: str, tmp_path: Path) -> None:
    """Sliding windows, states of linear attention and batches are saved, also those whose sequences were reordered."""
    model, batch = matrix.model(family, torch.float64), families.batch(family, dtype=torch.float64)
    cache = foveakv.cache_for(model, matrix.method("snapkv"), saveable=True)
    name = matrix.cache_argument(family)
    model(**batch.inputs, **{name: cache})
    cache.reorder_cache(torch.tensor([1, 0, *range(2, len(batch.pads))]))
    cache.save(tmp_path / "cache")
    loaded = foveakv.load_cache(tmp_path / "cache", model)
    ids = torch.full((len(batch.pads), 1), 17)
    ours, theirs = (model(input_ids=ids, **{name: each}).logits for each in (loaded, cache))
    assert torch.equal(ours, theirs)


def test_only_slots_in_use_are_saved(tmp_path: Path) -> None:
    _, _, cache = start("llava", matrix.method("snapkv", budget=8), steps=1)
    cache.save(tmp_path / "cache")
    layer = cache.compressed[0]
    slots = sum(each.segments.total for each in cache.compressed)
    wide = layer.segments.runs.keys.shape[1] + layer.segments.runs.values.shape[1]
    tensors = load_file(tmp_path / "cache")
    assert sum(t.nbytes for t in tensors.values() if t.dtype == torch.float64) == slots * wide * 8


def test_another_prompt_method_or_model_is_refused(tmp_path: Path) -> None:
    model, inputs, cache = start("llava", matrix.method("snapkv"))
    path = tmp_path / "cache"
    cache.save(path)
    other = {**inputs, "pixel_values": inputs["pixel_values"] + 1}
    with pytest.raises(errors.InputError, match=r"other images.*pixel_values"):
        foveakv.load_cache(path, model, inputs=other)
    with pytest.raises(errors.InputError, match="pixel_values"):
        foveakv.load_cache(path, model, inputs={"input_ids": inputs["input_ids"]})
    with pytest.raises(errors.InputError, match="another text"):
        foveakv.load_cache(path, model, inputs={**inputs, "input_ids": inputs["input_ids"] + 1})
    with pytest.raises(errors.InputError, match=r"budget: saved with 0.5, now 0.4"):
        foveakv.load_cache(path, model, method=matrix.method("snapkv", budget=0.4))
    with pytest.raises(errors.InputError, match="method: saved with 'snapkv', now 'adakv'"):
        foveakv.load_cache(path, model, method=matrix.method("adakv"))
    with pytest.raises(errors.InputError, match="model: saved with"):
        foveakv.load_cache(path, matrix.model("qwen2_5_vl", torch.float64))
    with pytest.raises(errors.InputError, match=r"dtype: saved with 'torch.float64', now 'torch.float32'"):
        foveakv.load_cache(path, families.build("llava"))
    edit(path, lambda header: header["key"].update(transformers="4.0.0"))
    with pytest.raises(errors.InputError, match=r"transformers: saved with '4\.0\.0'"):
        foveakv.load_cache(path, model)


def edit(path: Path, change: Any) -> None:
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["foveakv"])
    change(header)
    save_file(load_file(path), path, metadata={"foveakv": json.dumps(header)})


def test_nothing_of_a_file_is_executed(tmp_path: Path) -> None:
    """Only known classes are made, and their constructors are not called."""
    model, _, cache = start("llava", matrix.method("h2o"))
    path = tmp_path / "cache"
    for name in (
        "os:system",
        "subprocess:Popen",
        "foveakv.memory.pool:Pool.use",
        "builtins:eval",
        "foveakv.cli.app:app",
    ):
        cache.save(path)
        edit(path, lambda header, name=name: header["cache"].update(state={"class": name, "fields": {"a": 1}}))
        with pytest.raises(errors.StoreError, match="damaged"):
            foveakv.load_cache(path, model)
    cache.save(path)
    edit(path, lambda header: header["cache"].update(config=1))
    with pytest.raises(errors.StoreError, match="damaged"):
        foveakv.load_cache(path, model)


def test_files_that_are_no_cache(tmp_path: Path) -> None:
    model = matrix.model("llava", torch.float64)
    with pytest.raises(errors.StoreError, match="cannot read"):
        foveakv.load_cache(tmp_path / "none", model)
    (tmp_path / "text").write_text("no cache")
    with pytest.raises(errors.StoreError, match="cannot read"):
        foveakv.load_cache(tmp_path / "text", model)
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(errors.StoreError, match="not a saved cache"):
        foveakv.load_cache(tmp_path / "other", model)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model, inputs, cache = start("llava", matrix.method("snapkv"))
    with pytest.raises(errors.StoreError, match="cannot write"):
        cache.save(tmp_path / "no" / "folder")
    assert list(tmp_path.iterdir()) == []
    plain = foveakv.cache_for(model, matrix.method("snapkv"))
    model(**inputs, **{matrix.cache_argument("llava"): plain})
    with pytest.raises(errors.UnsupportedModeError, match="saveable=True"):
        plain.save(tmp_path / "cache")
    with pytest.raises(errors.CacheInUseError, match="not complete"):
        foveakv.cache_for(model, matrix.method("snapkv"), saveable=True).save(tmp_path / "cache")
    cache.state = Odd(print)
    with pytest.raises(errors.StoreError, match=r"its state.what is a builtin_function_or_method"):
        cache.save(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


class Odd(State):
    """Not a dataclass, though its base class is one."""

    def __init__(self, what: Any) -> None:
        self.what = what


def test_every_attribute_is_saved_or_named() -> None:
    """A new attribute of a cache must be in a file, or in the list of those that are not."""
    model = matrix.model("llava", torch.float64)
    cache = foveakv.cache_for(model, matrix.method("snapkv"), saveable=True)
    known = set(vars(cache)) - set(NOT_SAVED)
    assert known == {
        "state", "prompt", "context", "blocks", "block_peak", "turn_start", "first_columns", "first_lengths",
        "undecided", "_request", "model_state", "placed", "contents", "kinds_known", "peak_nbytes",
        "prefill_seconds", "steps",
    }  # fmt: skip


@dataclass
class Remembered(State):
    which: torch.Tensor
    facts: dict[str, Any]


@dataclass
class Mine(Method):
    size: int = 3

    name: ClassVar[str] = "saved_method"

    def begin(self, request: PromptView) -> Remembered:
        return Remembered(torch.arange(request.prompt.batch), {"a": [1.5, None, (True, "b")]})

    def prefill(self, view: PrefillView) -> None:
        return None


def test_methods_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is defined beside a method of one's own is saved and loaded."""
    monkeypatch.setitem(registry._REGISTERED, "saved_method", Mine)
    model, inputs, cache = start("llava", Mine(size=4))
    cache.save(tmp_path / "cache")
    loaded = foveakv.load_cache(tmp_path / "cache", model, inputs=inputs)
    assert isinstance(loaded.state, Remembered)
    assert loaded.state.facts == {"a": [1.5, None, (True, "b")]}
    assert torch.equal(loaded.state.which, torch.tensor([0]))
    assert loaded.method == Mine(size=4)


def test_a_method_that_is_not_registered_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(registry._REGISTERED, "saved_method", Mine)
        model, inputs, cache = start("llava", Mine(size=4))
        cache.save(tmp_path / "cache")
    registry._REGISTERED.pop("saved_method", None)
    assert foveakv.load_cache(tmp_path / "cache", model, inputs=inputs, method=Mine(size=4)).method == Mine(size=4)


def test_attributes_that_are_no_data_are_refused(tmp_path: Path) -> None:
    model, _, cache = start("llava", matrix.method("snapkv"))
    path = tmp_path / "cache"
    for where, name, value in (("cache", "save", 1), ("layer", "crop", 1), ("cache", "state", {"dtype": "load"})):
        cache.save(path)

        def change(header: Any, where: str = where, name: str = name, value: Any = value) -> None:
            (header["cache"] if where == "cache" else header["layers"][0]).update({name: value})

        edit(path, change)
        with pytest.raises(errors.StoreError, match="damaged"):
            foveakv.load_cache(path, model)


def test_images_of_a_later_turn_are_not_those_of_the_prompt(tmp_path: Path) -> None:
    model, inputs = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64)
    text = {"input_ids": torch.tensor([families.words(20, 0)])}
    cache = foveakv.cache_for(model, matrix.method("snapkv"), saveable=True)
    for part in (text, {"input_ids": inputs["input_ids"], "pixel_values": inputs["pixel_values"]}):
        model(**part, **{matrix.cache_argument("llava"): cache})
    cache.save(tmp_path / "cache")
    assert foveakv.load_cache(tmp_path / "cache", model, inputs=text).seen == cache.seen
    assert cache.contents is not None
    cache.contents.crop(20)
    assert cache.contents.inputs == []


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "idefics3"])
def test_images_of_generate_are_recorded(family: str, tmp_path: Path) -> None:
    """Also where `generate` encodes them before its first pass."""
    model, inputs = matrix.model(family), families.prompt(family)
    with foveakv.compress(model, matrix.method("snapkv"), saveable=True) as session:
        model.generate(**inputs, max_new_tokens=3)
        session.cache.save(tmp_path / "cache")
    assert foveakv.load_cache(tmp_path / "cache", model, inputs=inputs).seen == session.cache.seen
    other = {**inputs, "pixel_values": inputs["pixel_values"] + 1}
    with pytest.raises(errors.InputError, match="pixel_values"):
        foveakv.load_cache(tmp_path / "cache", model, inputs=other)


def test_chunks_on_disk_are_in_memory_after_loading(tmp_path: Path) -> None:
    model, inputs, cache = start("llava", matrix.method("hybridkv", store="disk"))
    cache.save(tmp_path / "cache")
    loaded = foveakv.load_cache(tmp_path / "cache", model, inputs=inputs)
    assert torch.equal(go_on("llava", model, loaded, 3), go_on("llava", model, cache, 3))
