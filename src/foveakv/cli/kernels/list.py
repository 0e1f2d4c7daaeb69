"""`foveakv kernels list`: the attention backends and their state."""

from __future__ import annotations

from foveakv.cli import common


@common.friendly
def list_() -> None:
    """List the attention backends, and why one is unavailable on this machine. Nothing is built."""
    from foveakv.evaluation.environment import kernels as state
    from foveakv.kernels import build as builder

    out = common.output()
    for name, description in state().items():
        out.print(f"{name:10} {description}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"compiled kernels are stored in {builder.folder()}", markup=False, highlight=False, soft_wrap=True)
