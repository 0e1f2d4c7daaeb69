"""Check before attaching that attention passes handles on.

A compressed layer returns a `KVHandle` from `update` instead of tensors, and the model must pass it on, unread, to the
attention function that transformers selects by name. Most models do. Those that do not (attention written out in the
module, keys and values expanded from a latent after `update`, layers that reuse another layer's keys and values) are
refused here, by name and with the reason.

The model's text decoder is built once more from its config on torch's meta device, where tensors have shapes and no
memory, and reads a prompt of a few tokens. This touches neither the model nor its weights. It costs up to some ten
milliseconds a layer, once for each config in a process, and is left out for the decoders that the tests cover. A
decoder that cannot be built or run this way is not refused: what its attention does wrong with a handle is then an
error of the first forward pass.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor

from foveakv.engines.transformers import attention, compat, families
from foveakv.engines.transformers.handle import KVHandle
from foveakv.errors import UnsupportedModelError


class _Handle(KVHandle):
    """A handle that says which layer it is of where it is read."""

    def refuse(self, what: str) -> Any:
        raise _Read(self.layer.layer_idx, what)


class _Read(Exception):
    """A handle was read outside of the attention function."""


class _Layer(compat.CacheLayerMixin):
    """Stands in for a `CompressedLayer`: hands out handles and records which of them come to the attention function."""

    is_compileable = False
    is_sliding = False

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.seen = self.updates = self.attended = 0
        self.device = torch.device("meta")
        self.is_initialized = True

    def __getattribute__(self, name: str) -> Any:
        if name in ("keys", "values", "__deepcopy__"):
            raise _Read(self.layer_idx, f"{name} of the cache's layer")
        return super().__getattribute__(name)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[-2]
        self.updates += 1
        handle: Any = _Handle(self, key_states, value_states)
        return handle, handle

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def end_prefill(self, *unused: Any) -> None:
        self.attended += 1


def check(model: compat.PreTrainedModel) -> None:
    """Raises `UnsupportedModelError` where the attention of a layer that would be compressed does not take handles."""
    decoder = compat.decoder_of(model)
    if decoder.config.model_type in families.TESTED_DECODERS:
        return
    known = type(decoder), decoder.config.to_json_string()
    if known not in _found:
        _found[known] = _find(decoder)
    if _found[known] is not None:
        raise UnsupportedModelError(f"{type(model).__name__} is not supported: {_found[known]}")


_found: dict[tuple[type, str], str | None] = {}


def _find(decoder: compat.PreTrainedModel) -> str | None:
    """Why a decoder's attention does not take handles; None where it does, or where that cannot be tried out."""
    try:
        twin = _on_meta(decoder)
    except Exception:
        return None
    layers = [
        _Layer(idx) if type(layer) is compat.DynamicLayer else layer
        for idx, layer in enumerate(compat.default_layers(decoder.config))
    ]
    probed = [layer for layer in layers if isinstance(layer, _Layer)]
    cache = compat.Cache(layers=layers)
    argument = compat.cache_argument(twin)
    lazy, attention.thread.lazy = attention.thread.lazy, True
    try:
        with torch.no_grad():
            ids = torch.zeros(1, 3, dtype=torch.long, device="meta")
            twin(input_ids=ids, use_cache=True, **{argument: cache})
    except _Read as error:
        layer, what = error.args
        return (
            f"the attention of layer {layer} computes with the keys and values that its cache returns ({what}) instead "
            "of passing them on to transformers' AttentionInterface"
        )
    except UnsupportedModelError as error:  # of the attention function, e.g. an argument that no kernel implements
        return str(error)
    except Exception:
        return None  # says nothing about the handles: e.g. an operation that the meta device does not have
    finally:
        attention.thread.lazy = lazy
    for layer in probed:
        if layer.updates == 0:
            return f"layer {layer.layer_idx} stores no keys and values of its own"
        if layer.updates > 1:
            return f"layer {layer.layer_idx} stores the keys and values of every token {layer.updates} times"
        if layer.attended != layer.updates:
            return f"the attention of layer {layer.layer_idx} does not go through transformers' AttentionInterface"
    return None


def _on_meta(decoder: compat.PreTrainedModel) -> Any:
    """A decoder like this one whose tensors have no memory."""
    config = copy.deepcopy(decoder.config)
    base = str(config._attn_implementation)
    # Kernels of other attention implementations do not run on the meta device; what the model does is the same.
    config._attn_implementation = attention.implementation(base if base in ("eager", "sdpa") else "sdpa")
    with torch.device("meta"), contextlib.suppress(AttributeError):
        return type(decoder)(config).eval()
    raise RuntimeError("the decoder cannot be built from its config")
