"""What methods may know of the model that vLLM runs, read from its checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from foveakv.engines.transformers.fingerprint import digest
from foveakv.errors import MethodError
from foveakv.methods import ModelFacts

_EMBEDDINGS = "embed_tokens.weight"
_NO_PARAMETERS = ("rotary_emb.inv_freq",)


def facts_of(model_config: Any, layers: int) -> ModelFacts:
    """Return the facts of a model. model_config: vLLM's `ModelConfig`. layers: number of decoder layers."""
    config = model_config.hf_text_config

    @functools.cache
    def digest_of_checkpoint() -> str:
        folder = _folder(str(model_config.model), model_config.revision)
        return digest(config, decoder_parameters(folder))

    return ModelFacts(tuple(range(layers)), layers, str(config.model_type), digest_of_checkpoint)


def decoder_parameters(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a checkpoint's text decoder, in the order of their names in the decoder.

    Raises:
        MethodError: the folder has no safetensors files, or they have no text decoder.
    """
    from safetensors import safe_open

    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    prefixes = [name.removesuffix(_EMBEDDINGS) for name in files if name.endswith(_EMBEDDINGS)]
    if len(prefixes) != 1:
        raise MethodError(
            f"the model in {folder} cannot be identified, since it has no safetensors files with one text decoder; "
            "name the deciding layer (score_layer=16)"
        )
    names = {name.removeprefix(prefixes[0]): name for name in files if name.startswith(prefixes[0])}
    for name in sorted(each for each in names if not each.endswith(_NO_PARAMETERS) and not each.startswith("lm_head.")):
        with safe_open(files[names[name]], "pt") as opened:
            yield name, opened.get_tensor(names[name])


def _folder(model: str, revision: str | None) -> Path:
    """Return the folder of a model: the path itself, or where the hub's files are stored locally."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True, allow_patterns="*.safetensors"))
    except (OSError, ValueError) as error:  # what the hub raises for files or names that it does not have
        raise MethodError(
            f"the files of {model} are not on this machine, so its calibration file cannot be found; name the deciding "
            "layer (score_layer=16)"
        ) from error
