"""The embedded model as a stock `LlavaForConditionalGeneration`, and its adapter: a projector and LoRA updates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foveakv.errors import ModelLoadError
from foveakv.models.embedded.convert import IMAGE_TOKEN, VISION_CONFIG, TextFile
from foveakv.util.files import replacing

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlavaForConditionalGeneration

IMAGE_SIZE = 112  # pixels a side; 112 / 14 = 8, so an image is 8 x 8 = 64 tokens
IMAGE_TOKENS = (IMAGE_SIZE // VISION_CONFIG["patch_size"]) ** 2
ADAPTER_FORMAT = "foveakv-adapter-1"


@dataclass(frozen=True)
class Adapter:
    """The trained part: a projector, and low-rank updates of the text model's linear layers.

    projector: state dict of `LlavaMultiModalProjector`. updates: module path below the language model ->
    (A [rank, in], B [out, rank]); the layer's weight becomes W + scale * B @ A. layers: the vision tower's hidden
    states that the projector reads. info: free text about the training run.
    """

    projector: dict[str, torch.Tensor]
    updates: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float
    layers: tuple[int, ...]
    info: dict[str, str]

    def save(self, file: Path) -> None:
        """Write a bf16 safetensors file. OutputError: it cannot be written."""
        from safetensors.torch import save

        tensors = {f"projector.{name}": t for name, t in self.projector.items()}
        for path, (a, b) in self.updates.items():
            tensors[f"updates.{path}.A"], tensors[f"updates.{path}.B"] = a, b
        metadata = {**self.info, "format": ADAPTER_FORMAT, "scale": str(self.scale)}
        metadata["vision_feature_layer"] = ",".join(map(str, self.layers))
        content = save({k: t.detach().to(torch.bfloat16).contiguous() for k, t in tensors.items()}, metadata=metadata)
        with replacing(file) as temporary:
            temporary.write_bytes(content)

    @classmethod
    def read(cls, file: Path) -> Adapter:
        """Read a file that `save` wrote. ModelLoadError: it is missing, truncated or of another format."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(file), framework="pt") as f:
                metadata = f.metadata() or {}
                tensors = {name: f.get_tensor(name).float() for name in f.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(
                f"cannot read the adapter {file}: {error}. Reinstall foveakv to restore it."
            ) from error
        if metadata.pop("format", None) != ADAPTER_FORMAT:
            raise ModelLoadError(f"{file} is not a {ADAPTER_FORMAT} file. Reinstall foveakv to restore it.")
        scale, layers = float(metadata.pop("scale")), metadata.pop("vision_feature_layer")
        projector = {k.removeprefix("projector."): t for k, t in tensors.items() if k.startswith("projector.")}
        paths = [k.removeprefix("updates.").removesuffix(".A") for k in tensors if k.endswith(".A")]
        updates = {p: (tensors[f"updates.{p}.A"], tensors[f"updates.{p}.B"]) for p in paths}
        return cls(projector, updates, scale, tuple(int(n) for n in layers.split(",")), metadata)

    @torch.no_grad()
    def apply(self, model: LlavaForConditionalGeneration) -> None:
        """Load the projector and add the low-rank updates to the fp32 weights of `model`, in place. Apply only once."""
        model.model.multi_modal_projector.load_state_dict(self.projector)
        for path, (a, b) in self.updates.items():
            weight = model.model.language_model.get_submodule(path).weight
            weight += self.scale * (b @ a)


def skeleton(vision: dict[str, torch.Tensor], text: TextFile, layers: tuple[int, ...]) -> LlavaForConditionalGeneration:
    """An fp32 LLaVA with the packaged towers and an untrained projector, which needs an `Adapter`."""
    from transformers import Dinov2Config, Dinov2Model, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision_config = Dinov2Config(**VISION_CONFIG)
    # from_pretrained converts the layer names to this transformers version; load_state_dict does not
    tower, report = Dinov2Model.from_pretrained(
        None, config=vision_config, state_dict=dict(vision), dtype=torch.float32, output_loading_info=True
    )
    unused = [key for key in report["unexpected_keys"] if not key.startswith("decoder.")]
    if report["missing_keys"] or unused:
        raise ModelLoadError(
            f"the vision weights do not fit Dinov2Model: missing {report['missing_keys']}, unused {unused}"
        )
    config = LlavaConfig(
        vision_config=vision_config,
        text_config=LlamaConfig(**text.config),
        vision_feature_layer=list(layers),
        vision_feature_select_strategy="default",  # drops CLS
        image_seq_length=IMAGE_TOKENS,
        image_token_index=image_token_id(text.tokenizer()),
        tie_word_embeddings=True,
        pad_token_id=text.config["pad_token_id"],
    )
    model = LlavaForConditionalGeneration(config).float()
    model.model.vision_tower.load_state_dict(tower.state_dict())
    model.model.language_model.load_state_dict(text.state())
    model.tie_weights()
    return model.eval()


def image_token_id(tokenizer: Tokenizer) -> int:
    """The id of `<image>` in the tokenizer that `TextFile.tokenizer` built."""
    token_id = tokenizer.token_to_id(IMAGE_TOKEN)
    if token_id is None:
        raise ModelLoadError(f"the tokenizer has no {IMAGE_TOKEN} token")
    return token_id


def image_features(model: LlavaForConditionalGeneration, pixels: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    """The input of the projector. pixels: [N, 3, 112, 112]; returns [N, 64, len(layers) * 384]."""
    out: Any = model.model.vision_tower(pixels, output_hidden_states=True)
    return torch.cat([out.hidden_states[n][:, 1:] for n in layers], dim=-1)
