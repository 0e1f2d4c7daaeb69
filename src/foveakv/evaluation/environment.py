"""The environment of a measurement: versions, device, threads, attention; for result files and `foveakv doctor`."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

PACKAGES = ("torch", "transformers", "numpy", "pillow", "torchvision", "onnx", "gguf", "matplotlib", "ray")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages in use; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("foveakv", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if found["foveakv"] is None:
        from foveakv import __version__

        found["foveakv"] = __version__
    return found


def processor_name() -> str:
    """The name of the CPU, if the system reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def kernels() -> dict[str, str]:
    """The decode attention backends and their state on this machine, without building one."""
    from foveakv.kernels import BACKENDS, build, problem

    return {
        name: build.KERNEL.state if name == "cpu" else (reason and f"unavailable: {reason}") or "ready"
        for name in BACKENDS
        for reason in [None if name == "cpu" else problem(name)]
    }


def describe(model: Any = None, *, seed: int | None = None) -> dict[str, Any]:
    """Plain values that a reader needs to reproduce a measurement.

    model: adds its class, name, revision, size, dtype, device and attention. seed: recorded as it is.
    """
    import torch

    found: dict[str, Any] = {
        "versions": versions(),
        "platform": platform.platform(),
        "cpu": processor_name(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernels": kernels(),
        "seed": seed,
    }
    if model is not None:
        found["model"] = {
            "class": type(model).__name__,
            "name": getattr(model.config, "_name_or_path", "") or None,
            "revision": getattr(model.config, "_commit_hash", None),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "attention": getattr(model.config, "_attn_implementation", None),
        }
    return found
