"""Objects of a cache as JSON and tensors, and back, without pickle.

Loading makes objects of known classes only, and calls none of their code: classes of this library, and states of
methods whose module is imported already. Segments are taken apart by functions of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foveakv.errors import StoreError
from foveakv.memory.chunks import ChunkStore
from foveakv.memory.pool import Pool
from foveakv.memory.saved_segments import from_parts, to_parts
from foveakv.memory.segments import Segments
from foveakv.methods.views import State

_ROOMS = ("foveakv.core.", "foveakv.memory.", "foveakv.methods.", "foveakv.engines.transformers.")
_CLASSES = ("ChunkStore", "Digests", "Placed")  # that are neither dataclasses nor states
_PLAIN = (bool, int, float, str, type(None))


class Packer:
    """Takes values apart. tensors: what was found so far, by the name that the JSON has for it."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._held: list[Tensor] = []  # so that no id is used twice

    def pack(self, value: Any, where: str) -> Any:
        """Return JSON for a value; where: what it is, for messages.

        Raises:
            StoreError: it holds something that cannot be saved.
        """
        if isinstance(value, Tensor):
            return {"tensor" if value.device.type == "cpu" else "on_device": self._tensor(value)}
        if isinstance(value, _PLAIN):
            return value if value == value and value not in (float("inf"), float("-inf")) else {"float": repr(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, Segments):
            return {"segments": self.pack(to_parts(value), where)}
        if type(value) in (list, tuple):
            items = [self.pack(each, f"{where}[{number}]") for number, each in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        if type(value) is dict:
            return {"dict": [[self.pack(k, where), self.pack(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        if find_class(name) is not type(value):
            raise StoreError(
                f"this cache cannot be saved: {where} is a {type(value).__name__}; states of methods hold tensors, "
                "plain values, lists, tuples, dicts and other states"
            )
        return {"class": name, "fields": {k: self.pack(v, f"{where}.{k}") for k, v in _contents(value).items()}}

    def _tensor(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = name = f"t{len(self.tensors)}"
            self._held.append(tensor)
            # A copy of its own: files hold no views, and a store may be a mapping of a file.
            self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return self._names[id(tensor)]


class Unpacker:
    """Puts values together again.

    tensors: by name. device: where tensors go that were not on the host. pool: for the slots; None: buffers.
    """

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, pool: Pool | None) -> None:
        self.tensors, self.device, self.pool = tensors, device, pool

    def unpack(self, packed: Any) -> Any:
        """Return the value. KeyError, TypeError, ValueError, AttributeError: the JSON is not what `Packer` makes."""
        if isinstance(packed, _PLAIN):
            return packed
        if isinstance(packed, list):
            return [self.unpack(each) for each in packed]
        ((kind, content), *rest) = packed.items()
        if kind == "class":
            return self._object(content, packed["fields"])
        if rest:
            raise ValueError("unknown entry")
        return _KINDS[kind](self, content)

    def _object(self, name: str, fields: dict[str, Any]) -> Any:
        cls = find_class(name)
        if cls is None:
            raise ValueError(f"unknown class {name!r}")
        made: Any = object.__new__(cls)
        values = {key: self.unpack(value) for key, value in fields.items()}
        with torch.inference_mode(False):
            if dataclasses.is_dataclass(cls):
                for field in dataclasses.fields(cls):
                    if field.name not in values and field.default_factory is not dataclasses.MISSING:
                        object.__setattr__(made, field.name, field.default_factory())
            for key, value in values.items():
                object.__setattr__(made, key, value)
        if isinstance(made, ChunkStore):
            made._staging, made.place = None, "host" if made.place == "disk" else made.place  # it is in memory now
        return made


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return found


_KINDS: dict[str, Callable[[Unpacker, Any], Any]] = {
    "tensor": lambda unpacker, content: unpacker.tensors[content],
    "on_device": lambda unpacker, content: unpacker.tensors[content].to(unpacker.device),
    "float": lambda unpacker, content: float(content),
    "dtype": lambda unpacker, content: _dtype(content),
    "device": lambda unpacker, content: unpacker.device,
    "tuple": lambda unpacker, content: tuple(unpacker.unpack(each) for each in content),
    "dict": lambda unpacker, content: {unpacker.unpack(k): unpacker.unpack(v) for k, v in content},
    "segments": lambda unpacker, content: from_parts(unpacker.unpack(content), unpacker.device, unpacker.pool),
}


def find_class(name: str) -> type | None:
    """Return the class that "module:name" means if objects of it may be made; None otherwise.

    Modules of this library are imported for it, no others.
    """
    module, _, attribute = name.partition(":")
    if module.startswith(_ROOMS):
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except ImportError:
            return None
    else:
        found = getattr(sys.modules.get(module), attribute, None)
        if not (isinstance(found, type) and issubclass(found, State)):
            return None
    if not isinstance(found, type) or found.__module__ != module:
        return None
    known = dataclasses.is_dataclass(found) or issubclass(found, State) or found.__name__ in _CLASSES
    return found if known else None


def _contents(value: Any) -> dict[str, Any]:
    """The attributes that make up an object; what it remembers of computed values is left out."""
    left_out = {"_staging"} if isinstance(value, ChunkStore) else set()
    if dataclasses.is_dataclass(value):  # private fields that are made empty hold what was computed
        made = [field for field in dataclasses.fields(value) if field.default_factory is not dataclasses.MISSING]
        left_out |= {field.name for field in made if field.name.startswith("_")}
    left_out |= {key for key in vars(value) if isinstance(getattr(type(value), key, None), functools.cached_property)}
    return {key: each for key, each in vars(value).items() if key not in left_out}
