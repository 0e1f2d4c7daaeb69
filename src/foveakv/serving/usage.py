"""The usage of a complete request: OpenAI's token counts, and what the caches took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foveakv.serving.job import Job


def usage_of(job: Job) -> dict[str, Any]:
    """Return the usage of a request whose answers are complete.

    Bytes are sums over the `n` answers, at their ends. share_of_full: stored_bytes / full_bytes. seconds: queue and
    prefill; token: median of one decode step.
    """
    reports = [answer.final for answer in job.answers if answer.final is not None]
    tokens = sum(answer.tokens for answer in job.answers)
    first, generation = reports[0], job.generation
    stored, full = (sum(getattr(each, name) for each in reports) for name in ("stored_bytes", "full_bytes"))
    started = job.started or job.submitted
    own: dict[str, Any] = {
        "method": generation.choice.method.name,
        "settings": first.settings,
        "kv_dtype": first.kv_dtype,
        "stored_bytes": stored,
        "full_bytes": full,
        "share_of_full": stored / full if full else 1.0,
        "peak_bytes": max(each.peak_bytes for each in reports),
        "host_bytes": sum(each.host_bytes for each in reports),
        "evicted": sum(each.evicted for each in reports),
        "retrieved": sum(each.retrieved for each in reports),
        "hit_rate": first.hit_rate,
        "seconds": {
            "queue": started - job.submitted,
            "prefill": (job.prefilled or started) - started,
            "token": first.token_seconds,
            "total": time.monotonic() - job.submitted,
        },
        "notes": first.notes,
    }
    if generation.kept:
        kept = job.answers[0].kept
        own["kept"] = None if kept is None else kept.to_dict()
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": generation.prompt_tokens + tokens,
        "foveakv": own,
    }
