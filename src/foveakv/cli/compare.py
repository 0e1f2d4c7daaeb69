"""`foveakv compare`: run several methods and budgets on one prompt and print one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from foveakv.cli import common
from foveakv.cli.common import (
    AllowUrlsOption,
    DebugOption,
    DeviceOption,
    DtypeOption,
    IgnoreEosOption,
    ImagesOption,
    KVDtypeOption,
    ModelOption,
    PromptOption,
    ResidualLengthOption,
    TokensOption,
    TrustOption,
)
from foveakv.cli.prompts import load_images
from foveakv.errors import InputError
from foveakv.util import files

if TYPE_CHECKING:
    from foveakv.evaluation.compare import Comparison


@dataclass(frozen=True)
class _Task:
    """A prompt with its images and, if known, the right answer. captions: one per image."""

    text: str
    images: Sequence[Any]
    captions: Sequence[str]
    question: str
    expected: str | None = None

    @classmethod
    def of_sample(cls, images: int, kind: str, ask_all: bool) -> _Task:
        """A sample prompt of the embedded model. InputError: there is no such sample."""
        from foveakv.models.embedded import sample_prompt

        sample = sample_prompt(images, kind=kind, ask=-1 if ask_all else None)
        return cls(sample.text, sample.images, sample.captions, sample.question.strip(), sample.answer)


@common.friendly
def compare(
    model: ModelOption = "demo",
    image: ImagesOption = None,
    allow_urls: AllowUrlsOption = False,
    prompt: PromptOption = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Use the embedded model's sample prompt with N images instead.")
    ] = None,
    sample_kind: Annotated[str, typer.Option(help="What the sample images show: digit, number or word.")] = "digit",
    ask_all: Annotated[
        bool, typer.Option("--ask-all", help="Ask for all cards of the sample prompt, not for one.")
    ] = False,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "full,hae,hybridkv,snapkv,random",
    budgets: Annotated[
        str, typer.Option(help="Budgets, separated by commas, for the methods that take one.")
    ] = "0.1,0.2",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="An option as method.key=value. Repeat it for several.")
    ] = None,
    kv_dtype: KVDtypeOption = None,
    residual_length: ResidualLengthOption = 32,
    max_new_tokens: TokensOption = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs per method; times are medians.")] = 1,
    ignore_eos: IgnoreEosOption = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw agreement, bytes and times into this image file.")] = None,
    kept_png: Annotated[
        Path | None, typer.Option("--kept-png", help="Draw which patches every method keeps into this image file.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare methods with the plain model: answers, bytes and times.

    The first row, `transformers`, is the plain model with its own cache; `full` is an uncompressed cache of foveakv.

    Example: foveakv compare --sample 8 --methods full,hybridkv,snapkv --budgets 0.1,0.2 --kept-png kept.png
    """
    from foveakv.cli.settings import parse_candidates, split_names
    from foveakv.engines.transformers.options import CacheOptions
    from foveakv.evaluation.compare import compare as run
    from foveakv.models.inputs import build_inputs

    files.check_output_files(json, plot, kept_png)
    common.check_plot_files(plot, kept_png)
    if (sample is None) == (prompt is None):
        raise InputError("give either --prompt (with --image) or --sample N")
    if sample is not None and (model != "demo" or image):
        raise InputError("--sample is a prompt of the embedded model: leave --image out, and --model too (or say demo)")
    if kept_png is not None and not (image or sample):
        raise InputError("--kept-png needs images: give --image or --sample")
    CacheOptions(kv_dtype=kv_dtype, residual_length=residual_length)  # raises if they are invalid
    chosen = parse_candidates(split_names(methods, "methods"), split_names(budgets, "budgets"), set_ or [])
    if sample is not None:
        task = _Task.of_sample(sample, sample_kind, ask_all)
    else:
        task = _Task(prompt or "", *load_images(image, allow_urls), prompt or "")
    loaded = common.load_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    inputs = build_inputs(loaded.processor, task.text, task.images, model=loaded.model)
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    with common.messages().status("warming up") as status:
        result = run(
            loaded.model, inputs, chosen, max_new_tokens=max_new_tokens, repeats=repeats, ignore_eos=ignore_eos,
            kv_dtype=kv_dtype, residual_length=residual_length,
            decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
            progress=lambda label, done, total: status.update(f"{escape(label)} ({done} of {total})"),
        )  # fmt: skip
    _print(result, task)
    _write(result, task, json, plot, kept_png)
    if result.failures:
        raise typer.Exit(common.EXIT_CODE)


def _print(result: Comparison, task: _Task) -> None:
    out = common.output()
    out.print(f"[bold]question[/bold]  {escape(task.question)}", highlight=False)
    if task.expected is not None:
        out.print(f"[bold]expected[/bold]  {escape(task.expected)}", highlight=False)
    out.print(result.table())
    for note in result.notes:
        out.print(f"* {escape(note)}", highlight=False)
    for row in result.failures:
        out.print(
            f"[bold red]failed:[/bold red] {escape(f'{row.label}: {row.error}')}", highlight=False, soft_wrap=True
        )


def _write(result: Comparison, task: _Task, json: Path | None, plot: Path | None, kept_png: Path | None) -> None:
    if json is not None:
        files.write_json(json, {"question": task.question, "expected": task.expected, **result.to_dict()})
    if plot is not None:
        from foveakv.analysis.viz import draw_comparison

        draw_comparison(plot, result)
    if kept_png is not None:
        from foveakv.analysis.viz import draw_kept

        title = task.question + ("" if task.expected is None else f"   (expected: {task.expected})")
        draw_kept(kept_png, task.images, result, captions=task.captions, title=title)
    common.say_written(json, plot, kept_png)
