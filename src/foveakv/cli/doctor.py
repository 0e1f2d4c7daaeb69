"""`foveakv doctor`: show versions and check this machine."""

from __future__ import annotations

from typing import Any

from foveakv.cli import common
from foveakv.util.tables import Column, FittedTable


@common.friendly
def doctor() -> None:
    """Show versions, devices and kernels, test the kernels, and say how to install what is missing."""
    common.quiet_transformers()
    import torch

    from foveakv.evaluation import environment

    tested = _self_test(torch)  # first, since it builds the CPU kernel if needed
    found = environment.describe()
    table = FittedTable([Column("", right=False), Column("", text=True, right=False)])
    for name, version in found["versions"].items():
        table.add(name, version or f"not installed{_remedy(name)}")
    table.add("cpu", f"{found['cpu']}, {found['threads']} threads")
    table.add("accelerator", found["accelerator"] or "none; models run on the CPU")
    for name, state in found["kernels"].items():
        table.add(f"kernel {name}", state)
    table.add("decode attention", tested)
    common.output().print(table)


def _remedy(name: str) -> str:
    if name == "torchvision":
        return " (not needed; image processors then use Pillow, and video processors are unavailable)"
    if name in ("onnx", "gguf", "matplotlib"):
        return " (needed for the embedded model and plots: pip install 'foveakv[demo]')"
    return ""


def _self_test(torch: Any) -> str:
    """Run every available kernel on a ragged cache, compare it with the reference, and name the default."""
    from foveakv.kernels import BACKENDS, choose, decode_attention, problem
    from foveakv.memory.segments import Segments

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, 64, 16, generator=generator).to(device) for _ in range(2))
    query = torch.randn(1, 4, 1, 16, generator=generator).to(device)
    keep = torch.rand(1, 2, 64, generator=generator) < 0.5
    positions = torch.arange(64)[None]
    runs = Segments.from_dense(keys, values, keep.to(device), positions.to(device)).runs
    beside = Segments.from_dense(keys.cpu(), values.cpu(), keep, positions).runs
    reference, _ = decode_attention(query.cpu(), beside, 0.25, backend="reference")
    results = []
    for name in BACKENDS:
        if problem(name) is not None:
            continue
        here = (query.cpu(), beside) if name == "cpu" else (query, runs)
        error = float((decode_attention(*here, 0.25, backend=name)[0].cpu() - reference).abs().max())
        results.append(f"{name} {'ok' if error < 1e-4 else f'WRONG by {error:.1e}'}")
    return f"{', '.join(results)}; auto is {choose(query, runs)} on {device}"
