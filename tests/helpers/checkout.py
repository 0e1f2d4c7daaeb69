"""The files of the repository: those that git knows, so that no stray file in the folder changes what is tested."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def committed(pattern: str) -> list[Path] | None:
    """Committed files whose path from the root fits a pattern of git's (a * reaches into folders too), in order.

    None where there is no checkout, as in an unpacked archive.
    """
    try:
        listed = subprocess.run(["git", "ls-files", "-z", "--", pattern], cwd=ROOT, capture_output=True, check=True)
        top = subprocess.run(["git", "rev-parse", "--show-toplevel"], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    if Path(top.stdout.decode().rstrip("\n")).resolve() != ROOT.resolve():
        return None  # the checkout of something around it
    return sorted(ROOT / name for name in listed.stdout.decode().split("\0") if name)
