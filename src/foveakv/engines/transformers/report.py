"""Report on one prompt: slots, bytes, evictions, retrievals and times, as a table, a dict or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.blocks import BlockReport

if TYPE_CHECKING:
    from rich.table import Table

    from foveakv.engines.transformers.cache import CompressedCache
    from foveakv.engines.transformers.layer import CompressedLayer


_TOTALS = (
    "tokens_seen",
    "full_slots",
    "stored_slots",
    "full_bytes",
    "stored_bytes",
    "peak_bytes",
    "host_bytes",
    "compression",
    "kv_dtype",
    "residual_length",
    "saved_by_quantization",
    "evicted",
    "restored",
    "retrieved",
    "flushes",
    "hit_rate",
    "prefill_seconds",
    "token_seconds",
    "steps",
    "notes",
)


@dataclass(frozen=True)
class LayerReport:
    """Report on one compressed layer. Slots are (KV head, token) pairs over all sequences; bytes are storage bytes.

    layer: the model's index of the layer. full_slots, full_bytes: without compression. stored_slots: slots that a step
    attends to. stored_bytes: on the compute device. host_bytes: the backing store. evicted, restored: slots that were
    evicted, and that were marked for eviction and kept. retrieved: slots requested by retrieval; hits: those of them
    that were already on the device. flushes: flushes of the recycle bin.
    """

    layer: int
    full_slots: int
    stored_slots: int
    full_bytes: int
    stored_bytes: int
    host_bytes: int
    evicted: int
    restored: int
    retrieved: int
    hits: int
    flushes: int

    @classmethod
    def of(cls, layer: CompressedLayer) -> LayerReport:
        """Create the report of a layer in its current state."""
        segments = layer.segments
        per_column = 0 if layer.prompt_columns == 0 else layer.full_nbytes // layer.prompt_columns
        later = layer.seen - layer.prompt_columns
        heads = 0 if segments is None else segments.batch * segments.heads
        return cls(
            layer=layer.layer_idx,
            full_slots=layer.prompt_slots + later * heads,
            stored_slots=layer.stored_slots,
            full_bytes=layer.full_nbytes + later * per_column,
            stored_bytes=layer.device_nbytes,
            host_bytes=layer.host_nbytes,
            evicted=layer.counts.evicted,
            restored=layer.counts.restored,
            retrieved=layer.counts.retrieved,
            hits=layer.counts.hits,
            flushes=layer.counts.flushes,
        )


@dataclass(frozen=True)
class Report:
    """Report on a cache at one point in time.

    settings: the method and its settings. layers: one report per compressed layer. tokens_seen: tokens of the context.
    full_bytes: size of a plain cache with the same tokens (padding included, as in transformers). stored_bytes: storage
    on the compute device, including slack, positions, per-slot fields and digests. peak_bytes: maximum of stored_bytes
    during prefill and decoding. host_bytes: the backing store. prefill_seconds, token_seconds: wall time on the host
    without synchronization (for accelerators use `foveakv.evaluation.compare`); token_seconds is the median of `steps`
    forward passes over one token. details: figures of the method. kv_dtype: dtype of quantized slots; the
    residual_length newest tokens are stored in full precision. saved_by_quantization: bytes saved compared to the same
    slots in the model's dtype. method_notes: caveats from the cache and the method. branches: for every other cache of
    the same call (the unconditional branch of `guidance_scale`), its method, tokens_seen and stored_bytes.
    blocks: what was stored of the prompt and of every further block.
    """

    settings: dict[str, Any]
    layers: list[LayerReport]
    tokens_seen: int
    stored_bytes: int
    full_bytes: int
    peak_bytes: int
    host_bytes: int
    prefill_seconds: float
    token_seconds: float | None
    steps: int
    details: dict[str, Any]
    kv_dtype: str | None = None
    residual_length: int | None = None
    saved_by_quantization: int = 0
    method_notes: tuple[str, ...] = ()
    branches: tuple[dict[str, Any], ...] = ()
    blocks: tuple[BlockReport, ...] = ()

    @classmethod
    def of(cls, cache: CompressedCache, branches: Sequence[CompressedCache] = ()) -> Report:
        """Create the report of a cache in its current state.

        branches: caches of the same call that are not the prompt's (`guidance_scale`).
        """
        cache.note_peak()
        layers = [LayerReport.of(layer) for layer in cache.compressed]
        other = cache.stored_nbytes - cache.state_nbytes - sum(layer.stored_bytes for layer in layers)
        results = cache.results
        single = [seconds for tokens, seconds in cache.steps if tokens == 1]
        return cls(
            branches=tuple(
                {"method": other.method.name, "tokens_seen": other.seen, "stored_bytes": other.stored_nbytes}
                for other in branches
            ),
            settings=cache.method.describe(),
            layers=layers,
            tokens_seen=cache.seen,
            stored_bytes=cache.stored_nbytes,
            full_bytes=sum(layer.full_bytes for layer in layers) + other,
            peak_bytes=cache.peak_nbytes,
            host_bytes=sum(layer.host_bytes for layer in layers),
            prefill_seconds=cache.prefill_seconds,
            token_seconds=median(single) if single else None,
            steps=len(single),
            details=results.figures,
            kv_dtype=cache.kv_dtype,
            residual_length=None if cache.kv_dtype is None else cache.residual_length,
            saved_by_quantization=sum(
                layer.segments.saved_nbytes for layer in cache.compressed if layer.segments is not None
            ),
            method_notes=(*cache.notes, *results.notes),
            blocks=tuple(cache.blocks),
        )

    def _total(self, name: str) -> int:
        return sum(getattr(layer, name) for layer in self.layers)

    @property
    def full_slots(self) -> int:
        """Slots of a cache without compression."""
        return self._total("full_slots")

    @property
    def stored_slots(self) -> int:
        """Slots that a step attends to."""
        return self._total("stored_slots")

    @property
    def evicted(self) -> int:
        """Evicted slots."""
        return self._total("evicted")

    @property
    def restored(self) -> int:
        """Slots that were marked for eviction and kept."""
        return self._total("restored")

    @property
    def flushes(self) -> int:
        """Flushes of recycle bins."""
        return self._total("flushes")

    @property
    def retrieved(self) -> int:
        """Slots requested by retrieval, whether loaded or already on the device."""
        return self._total("retrieved")

    @property
    def hit_rate(self) -> float | None:
        """Share of the retrieved slots that were already on the device; None if nothing was retrieved."""
        return self._total("hits") / self.retrieved if self.retrieved else None

    @property
    def compression(self) -> float:
        """full_bytes / stored_bytes; 1 if nothing is stored."""
        return self.full_bytes / self.stored_bytes if self.stored_bytes else 1.0

    @property
    def notes(self) -> list[str]:
        """Caveats for readers of the figures."""
        found = list(self.method_notes)
        if self.settings["method"] != "full" and self.evicted == 0 and self.retrieved == 0:
            found.append("nothing was evicted or retrieved: this run does not measure the method")
        if self.kv_dtype is not None and self.stored_slots and self.saved_by_quantization <= 0:
            found.append(
                f"kv_dtype={self.kv_dtype!r} saves no memory: with scales and a residual window of "
                f"{self.residual_length} tokens per head, quantized slots take {-self.saved_by_quantization:,} bytes "
                "more than full precision"
            )
        for branch in self.branches:
            found.append(
                f"a second branch of {branch['tokens_seen']:,} tokens (guidance_scale) has its own cache, stored by "
                f"method {branch['method']} in {branch['stored_bytes']:,} bytes; it is not in these figures"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: settings, totals, times, versions, and one entry per layer."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        return {
            "settings": self.settings,
            **totals,
            "details": self.details,
            **({"branches": list(self.branches)} if self.branches else {}),
            "blocks": [vars(block) for block in self.blocks],
            "layers": [vars(layer) for layer in self.layers],
            "transformers": compat.VERSION,
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return the values of `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def table(self) -> Table:
        """Return the totals as a rich table."""
        from rich.table import Table

        table = Table(title=f"foveakv report: {self.settings['method']}", show_header=False)
        table.add_row("tokens seen", f"{self.tokens_seen:,}")
        table.add_row("slots", f"{self.stored_slots:,} of {self.full_slots:,}")
        table.add_row("evicted / restored", f"{self.evicted:,} / {self.restored:,}")
        if self.hit_rate is not None:
            table.add_row("retrieved (hit rate)", f"{self.retrieved:,} ({self.hit_rate:.0%})")
        table.add_row("stored bytes", f"{self.stored_bytes:,} of {self.full_bytes:,} ({self.compression:.1f}x smaller)")
        if self.kv_dtype is not None:
            table.add_row("stored as", f"{self.kv_dtype}, newest {self.residual_length} tokens in full precision")
        table.add_row("peak bytes", f"{self.peak_bytes:,}")
        if len(self.blocks) > 1:
            newest = self.blocks[-1]
            table.add_row(
                "blocks", f"{len(self.blocks)}; the newest ({newest.kind}) of {newest.tokens:,} tokens, decided over "
                f"{newest.decided}, peak {newest.peak_bytes:,} bytes",
            )  # fmt: skip
        if self.host_bytes:
            table.add_row("host bytes", f"{self.host_bytes:,}")
        table.add_row("prefill", f"{self.prefill_seconds * 1e3:,.0f} ms")
        if self.token_seconds is not None:
            table.add_row("per token", f"{self.token_seconds * 1e3:,.1f} ms (median of {self.steps} steps)")
        for note in self.notes:
            table.add_row("note", note)
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100, no_color=True)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get().rstrip()
