"""`python -m benchmarks run NAME` measures and writes results/NAME.json; `report` and `readme` write pages from them.

`--quick` runs in seconds on tiny sizes: it checks that a benchmark works and is not a measurement.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import common
from benchmarks.engine_commands import vllm, vllm_accuracy
from benchmarks.measure import measure
from benchmarks.methods import ALL, CORE
from benchmarks.options import (
    Backend,
    Budgets,
    Contexts,
    DigestDtype,
    Dtype,
    Geometry,
    Label,
    Methods,
    Out,
    Quick,
    Repeats,
    Resume,
    Seed,
)
from benchmarks.serving_command import serving

app = typer.Typer(help=__doc__, no_args_is_help=True)
run = typer.Typer(help="Run one benchmark and write its JSON, row by row.", no_args_is_help=True)
app.add_typer(run, name="run")
run.command()(serving)
run.command()(vllm)
run.command("vllm_accuracy")(vllm_accuracy)


@run.command("decode_attention")
def decode_attention(
    geometry: Geometry = "qwen2.5-vl-7b",
    context: Contexts = None,
    budget: Budgets = None,
    method: Methods = None,
    repeats: Repeats = None,
    backend: Backend = "auto",
    digest_dtype: DigestDtype = None,
    dtype: Dtype = "fp32",
    seed: Seed = common.SEED,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """Attention and cache update per layer and token, and the time to read the same bytes once."""
    settings = {
        "geometry": geometry,
        "contexts": context or ([256] if quick else [2048, 8192, 32768, 131072]),
        "budgets": budget or ([0.2] if quick else [0.05, 0.1, 0.2, 0.5]),
        "methods": method or list(CORE),
        "repeats": repeats or (2 if quick else 70),
        "backend": backend,
        "digest_dtype": digest_dtype,
        "dtype": dtype,
        "seed": seed,
    }
    measure("decode_attention", settings, out=out, label=label, quick=quick, resume=resume)


@run.command()
def generate(
    model: Annotated[list[str] | None, typer.Option(help="demo, qwen2.5-vl-7b, qwen2.5-vl-3b or tiny.")] = None,
    context: Contexts = None,
    budget: Annotated[float, typer.Option(help="Share of the prompt.")] = 0.1,
    method: Methods = None,
    layers: Annotated[int, typer.Option(help="Layers of a random-weight slice.")] = 2,
    tokens: Annotated[int | None, typer.Option(help="New tokens.")] = None,
    block: Annotated[int, typer.Option(help="Tokens that a side generates per turn.")] = 16,
    batch: Annotated[int, typer.Option(help="Sequences; more than 1 with filled prompts only.")] = 1,
    prompt: Annotated[str, typer.Option(help="read, fill, or auto: read up to 8,192 tokens.")] = "auto",
    backend: Backend = "auto",
    dtype: Dtype = "fp32",
    seed: Seed = common.SEED,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """Whole models: time to first token and per token, compared with three full caches."""
    if prompt not in ("auto", "read", "fill"):
        raise typer.BadParameter(f"--prompt is read, fill or auto, not {prompt}")
    if batch > 1 and prompt != "fill":
        raise typer.BadParameter("--batch needs --prompt fill")
    settings = {
        "models": model or (["tiny"] if quick else ["demo", "qwen2.5-vl-7b"]),
        "contexts": context or ([160] if quick else [8192, 32768]),
        "budget": budget,
        "methods": method or ["full", "hae", "hybridkv", "snapkv"],
        "layers": layers,
        "tokens": tokens or (4 if quick else 128),
        "block": 2 if quick else block,
        "batch": batch,
        "prompt": prompt,
        "backend": backend,
        "dtype": dtype,
        "seed": seed,
    }
    measure("generate", settings, out=out, label=label, quick=quick, resume=resume)


@run.command()
def story(
    model: Annotated[str | None, typer.Option(help="demo, or a slice as in `generate`.")] = None,
    context: Annotated[int | None, typer.Option(help="Prompt tokens, about.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of a random-weight slice.")] = 2,
    tokens: Annotated[int | None, typer.Option(help="New tokens.")] = None,
    repeats: Repeats = None,
    backend: Backend = "auto",
    dtype: Dtype = "fp32",
    seed: Seed = common.SEED,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """HAE's story setting: 1,024 tokens of KV, bin 128, 512 new tokens, 5 beams, end to end."""
    settings = {
        "model": model or ("tiny" if quick else "demo"),
        "context": context or (160 if quick else 2400),
        "kv_size": 32 if quick else 1024,
        "bin": 4 if quick else 128,
        "tokens": tokens or (6 if quick else 512),
        "beams": 2 if quick else 5,
        "layers": layers,
        "repeats": repeats or 1,
        "backend": backend,
        "dtype": dtype,
        "seed": seed,
    }
    measure("story", settings, out=out, label=label, quick=quick, resume=resume)


@run.command()
def prefill(
    geometry: Annotated[str | None, typer.Option(help="qwen2.5-vl-7b, qwen2.5-vl-3b or tiny.")] = None,
    context: Contexts = None,
    budget: Annotated[float, typer.Option(help="Share of the prompt.")] = 0.1,
    method: Methods = None,
    layers: Annotated[int, typer.Option(help="Layers of the slice in the part `overhead`; 1 is enough.")] = 2,
    drop_layers: Annotated[int, typer.Option(help="Layers in the part `drop`; 0 skips it.")] = 4,
    repeats: Repeats = None,
    dtype: Dtype = "fp32",
    seed: Seed = common.SEED,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """What methods add to a prefill, and how much drop_hidden_states shortens it."""
    settings = {
        "geometry": geometry or ("tiny" if quick else "qwen2.5-vl-7b"),
        "contexts": context or ([256] if quick else [2048, 8192]),
        "budget": budget,
        "methods": method or ["hae", "hae (64 rows)", "hybridkv", "snapkv", "adakv", "h2o"],
        "layers": layers,
        "drop_layers": drop_layers,
        "repeats": repeats or 1,
        "dtype": dtype,
        "seed": seed,
    }
    measure("prefill", settings, out=out, label=label, quick=quick, resume=resume)


@run.command()
def short(
    budget: Annotated[float, typer.Option(help="Share of the prompt.")] = 0.2,
    method: Methods = None,
    tokens: Annotated[int | None, typer.Option(help="New tokens.")] = None,
    repeats: Repeats = None,
    seed: Seed = common.SEED,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """A prompt of about 850 tokens: first token and time per token, relative to the plain model."""
    settings = {
        "model": "tiny" if quick else "demo",
        "context": 160 if quick else 850,
        "budget": budget,
        "methods": method or ["full", "hae", "hybridkv", "snapkv", "adakv", "h2o"],
        "tokens": tokens or (2 if quick else 24),
        "repeats": repeats or (1 if quick else 7),
        "seed": seed,
    }
    measure("short", settings, out=out, label=label, quick=quick, resume=resume)


@run.command()
def memory(
    geometry: Geometry = "qwen2.5-vl-7b",
    context: Contexts = None,
    budget: Budgets = None,
    method: Methods = None,
    layers: Annotated[int, typer.Option(help="Layers, all with the same prompt.")] = 4,
    digest_dtype: DigestDtype = None,
    dtype: Dtype = "fp32",
    seed: Seed = common.SEED,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """Stored, peak and host bytes."""
    settings = {
        "geometry": geometry,
        "contexts": context or ([256] if quick else [8192]),
        "budgets": budget or ([0.2] if quick else [0.1, 0.2]),
        "methods": method or list(ALL),
        "layers": layers,
        "digest_dtype": digest_dtype,
        "dtype": dtype,
        "seed": seed,
    }
    measure("memory", settings, out=out, label=label, quick=quick, resume=resume)


@run.command()
def append(
    geometry: Geometry = "qwen2.5-vl-7b",
    context: Contexts = None,
    budget: Annotated[float, typer.Option(help="Share of the prompt that snapkv keeps.")] = 0.1,
    tokens: Annotated[int | None, typer.Option(help="Appended tokens.")] = None,
    dtype: Dtype = "fp32",
    seed: Seed = common.SEED,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """Appending decoded tokens to a long cache, without attention."""
    settings = {
        "geometry": geometry,
        "contexts": context or ([256] if quick else [32768]),
        "budget": budget,
        "tokens": tokens or (60 if quick else 1000),
        "dtype": dtype,
        "seed": seed,
    }
    measure("append", settings, out=out, label=label, quick=quick, resume=resume)


@run.command()
def kvpress(
    context: Contexts = None,
    budget: Budgets = None,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 2,
    tokens: Annotated[int | None, typer.Option(help="New tokens.")] = None,
    repeats: Repeats = None,
    dtype: Dtype = "fp32",
    seed: Seed = common.SEED,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """Comparison with kvpress in its own environment (created by benchmarks/peers/install.sh)."""
    settings = {
        "sizes": "tiny" if quick else "qwen2.5-7b-text",
        "contexts": context or ([256] if quick else [2048, 8192]),
        "budgets": budget or ([0.2] if quick else [0.1]),
        "layers": layers,
        "tokens": tokens or (4 if quick else 64),
        "repeats": repeats or (1 if quick else 2),
        "dtype": dtype,
        "seed": seed,
    }
    measure("kvpress", settings, out=out, label=label, quick=quick, resume=resume)


@run.command()
def scale(
    geometry: Geometry = "qwen2.5-vl-7b",
    context: Contexts = None,
    batch: Annotated[list[int] | None, typer.Option(help="Repeat for several.")] = None,
    method: Methods = None,
    repeats: Repeats = None,
    backend: Backend = "auto",
    dtype: Dtype = "fp32",
    seed: Seed = common.SEED,
    label: Label = "",
    out: Out = common.RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """How the cost of a step grows with context and batch size."""
    settings = {
        "geometry": geometry,
        "contexts": context or ([128, 256] if quick else [2048, 4096, 8192, 16384, 32768, 65536]),
        "batch_context": 128 if quick else 8192,
        "batches": batch or ([1, 2] if quick else [1, 2, 4, 8]),
        "share": 0.2 if quick else 0.1,
        "fixed": 64 if quick else 1024,
        "methods": method or ["full", "hae", "hybridkv", "snapkv"],
        "repeats": repeats or (2 if quick else 15),
        "backend": backend,
        "dtype": dtype,
        "seed": seed,
    }
    measure("scale", settings, out=out, label=label, quick=quick, resume=resume)


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="Folder of the result files.")] = common.RESULTS,
    out: Annotated[Path, typer.Option(help="The page; its plots go to a folder of the same name.")] = Path(
        __file__
    ).parent.parent
    / "docs"
    / "performance.md",
) -> None:
    """Write docs/performance.md and its plots from the result files."""
    from benchmarks.report import write

    write(results, out)
    Console().print(f"written: {out}")


@app.command()
def readme() -> None:
    """Write the README's tables from the result files."""
    from benchmarks.readme import update

    update()


if __name__ == "__main__":
    app()
