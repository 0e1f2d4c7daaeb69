"""What attaching changes on a model, and an error to interrupt it with."""

from __future__ import annotations

from typing import Any

import families
import torch

SHORT = {"max_new_tokens": 4, "do_sample": False}


def used(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model that has generated once: transformers installs hooks of its own in some vision towers then."""
    model = families.build(family, seed=seed, dtype=dtype)
    model.generate(**families.prompt(family, dtype=dtype), max_new_tokens=1)
    return model


def fingerprint(model: Any) -> dict[str, Any]:
    """Everything on a model that attaching could change: attributes, hooks, attention implementations, M-RoPE state."""

    def implementations(config: Any) -> Any:
        children = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
        nested = {key: implementations(child) for key, child in children.items() if child is not None}
        return config._attn_implementation, nested

    modules = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hook" in key and isinstance(value, dict)}
        plain = {key: value for key, value in vars(module).items() if isinstance(value, (int, str, bool, type(None)))}
        modules[name] = sorted(vars(module)), hooks, plain
    return {"modules": modules, "attention": implementations(model.config), "class": type(model)}


class Broken(Exception):
    pass
