"""Check and measure everything on a CUDA machine, in one run of a few minutes, without a download.

    PYTHONPATH=src python -m benchmarks.gpu --deadline 420          # writes benchmarks/results/gpu/<device>.json
    PYTHONPATH=src python -m benchmarks.gpu --smoke                 # on a CPU: the same code, toy sizes, interpreter
    PYTHONPATH=src python -m benchmarks.gpu --dry-run               # only prints what would run

Sections: `correctness` of the triton and blocks backends against float64; `graph`, a decode call captured and
replayed; `decode`, attention time per layer and token against full-cache attention; `generation`, a random-weight
Qwen2.5-VL with images end to end; `tune`, the kernel's launch settings. Each has a share of the deadline.
Failures and timeouts are recorded, and earlier measurements are kept: the file is written after every section.

Times are device times, from CUDA events around the call, with caches flushed before it (between two steps of a real
model every layer's keys leave the L2 cache). `host_us` is the time that a call takes on the host, which is larger for
short contexts unless calls are captured in a graph. Medians of `--repeats` calls, the sides of a comparison in turns.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu_common import Bench, Section

RESULTS = Path(__file__).parent / "results" / "gpu"
# Sections in order, with their shares of the deadline; time that one leaves unused goes to the later ones.
SHARES = {"correctness": 0.2, "graph": 0.08, "decode": 0.35, "generation": 0.25, "tune": 0.12}


def _section(name: str) -> Section:
    """Import a section when it is needed: the smoke run sets the environment first."""
    if name == "generation":
        from benchmarks import gpu_generation

        return gpu_generation.generation
    from benchmarks import gpu_attention

    section: Section = getattr(gpu_attention, name)
    return section


def _run_section(name: str, bench: Bench) -> Iterator[dict[str, Any]]:
    """Run a section as a generator, so that an import error fails this section only."""
    yield from _section(name)(bench)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=420, help="seconds for everything (default 420)")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls of every side (default 30)")
    parser.add_argument(
        "--section", action="append", choices=list(SHARES), help="run only this section; repeat for several"
    )
    parser.add_argument("--out", type=Path, help="the JSON file (default benchmarks/results/gpu/<device>.json)")
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU, triton in its interpreter")
    parser.add_argument("--dry-run", action="store_true", help="print what would run and stop")
    options = parser.parse_args(arguments)
    if options.deadline <= 0 or options.repeats < 1:
        parser.error("--deadline and --repeats must be positive")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    names = options.section or list(SHARES)
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if options.dry_run:
        share = sum(SHARES[name] for name in names)
        for name in names:
            print(f"{name}: up to {options.deadline * SHARES[name] / share:.0f} s. {_section(name).__doc__}")
        return 0
    import torch

    from benchmarks.gpu_common import Bench

    if not options.smoke and not torch.cuda.is_available():
        print("no CUDA device here; --smoke runs the same code at toy sizes on the CPU", file=sys.stderr)
        return 2
    if options.out is None:
        device = "smoke" if options.smoke else torch.cuda.get_device_name().lower().replace(" ", "-")
        options.out = RESULTS / f"{device}.json"
    bench = Bench(options)
    for number, name in enumerate(names):
        section = functools.partial(_run_section, name)
        bench.run(name, section, SHARES[name] / sum(SHARES[later] for later in names[number:]))
    print(f"written: {options.out}")
    bad = [name for name, record in bench.sections.items() if record["status"] == "failed"]
    bad += [str(row) for record in bench.sections.values() for row in record["rows"] if _wrong(row)]
    for what in bad:
        print(f"FAILED: {what}")
    return 1 if bad else 0


def _wrong(row: dict[str, Any]) -> bool:
    """Whether a row shows a fault: a result unlike the reference or the uncaptured call, or other tokens."""
    exact = row.get("method") == "full" and row.get("dtype") == "float32"
    wrong_tokens = exact and not row.get("tokens_equal", False)
    return (
        not all(row.get(name, True) for name in ("triton_ok", "blocks_ok", "equal")) or wrong_tokens or "error" in row
    )


if __name__ == "__main__":
    sys.exit(main())
