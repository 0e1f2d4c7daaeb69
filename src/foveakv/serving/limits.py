"""Limits of the server. Every default is safe for a server that strangers can reach."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from foveakv.errors import InputError

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may take.

    max_queue: requests that wait, those whose images are being read included; more get status 429.
    max_running: answers that are decoded together; `n` choices count as n.
    kv_bytes: stored bytes of all caches; None: see `default_kv_bytes`.
    max_body_bytes: size of a request. max_images, max_image_bytes, max_image_pixels: images of a request, and encoded
    bytes and pixels of each; max_total_pixels: pixels of all. max_text_chars: characters of all texts.
    max_prompt_tokens: None: the model's positions. max_new_tokens: of a reply. max_choices: the largest `n`.
    request_seconds: from the end of the upload to the end of the reply. body_seconds: time of an upload.
    write_seconds: time in which a client must take a part of a streamed reply. fetch_seconds: time for one image URL.
    """

    max_queue: int = 32
    max_running: int = 32
    kv_bytes: int | None = None
    max_body_bytes: int = 32 * MIB
    max_images: int = 16
    max_image_bytes: int = 10 * MIB
    max_image_pixels: int = 20_000_000
    max_total_pixels: int = 64_000_000
    max_text_chars: int = 400_000
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 1024
    max_choices: int = 4
    request_seconds: float = 600.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    fetch_seconds: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise InputError(f"{field.name} must be above 0, got {value!r}")


def default_kv_bytes(device: Any) -> int:
    """Half of the memory that is available now: of the CUDA device, else of the machine."""
    import torch

    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024 // 2
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
