"""`foveakv show`: draw which patches of the images a method keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from foveakv.cli import common, prompts
from foveakv.cli.common import (
    AllowUrlsOption,
    BudgetOption,
    DebugOption,
    DeviceOption,
    DtypeOption,
    IgnoreEosOption,
    ImagesOption,
    MethodOption,
    ModelOption,
    PromptOption,
    TokensOption,
    TrustOption,
)
from foveakv.cli.prompts import CsvOption, JsonOption, SetOption
from foveakv.errors import InputError
from foveakv.util import files
from foveakv.util.tables import Column, FittedTable


@common.friendly
def show(
    model: ModelOption = "demo",
    image: ImagesOption = None,
    allow_urls: AllowUrlsOption = False,
    prompt: PromptOption = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Use the embedded model's sample prompt with N images instead.")
    ] = None,
    sample_kind: Annotated[
        str | None, typer.Option(help="What the sample images show: digit (default), number or word.")
    ] = None,
    ask: Annotated[int | None, typer.Option(help="Index of the sample card to ask for, -1 for all.")] = None,
    method: MethodOption = "hybridkv",
    budget: BudgetOption = None,
    set_: SetOption = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", min=0, help="Draw a row for this layer. Repeat it for several.")
    ] = None,
    each_layer: Annotated[bool, typer.Option("--each-layer", help="Draw a row for every layer.")] = False,
    head: Annotated[
        int | None, typer.Option("--head", min=0, help="Index of a KV head; default: the mean of all.")
    ] = None,
    max_new_tokens: TokensOption = 16,
    ignore_eos: IgnoreEosOption = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Draw the images into this file.")] = None,
    filmstrip: Annotated[
        Path | None, typer.Option("--filmstrip", help="Draw what every decode step attends to into this file.")
    ] = None,
    frames: Annotated[int, typer.Option(min=1, help="Maximum number of rows of the filmstrip, evenly spaced.")] = 8,
    json: JsonOption = None,
    csv: CsvOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Draw which patches of the images a method keeps, and what every decode step attends to.

    Example: foveakv show --sample 8 --ask -1 --budget 0.2 --out kept.png --filmstrip steps.png
    """
    from foveakv.analysis.shown import shown
    from foveakv.cli.settings import build_method
    from foveakv.core.patches import image_columns
    from foveakv.evaluation import environment

    files.check_output_files(out, filmstrip, json, csv)
    common.check_plot_files(out, filmstrip)
    if not any((out, filmstrip, json, csv)):
        raise InputError("there is no output file; give --out, --filmstrip, --json or --csv")
    chosen = build_method(method, budget, set_ or [])
    kinds, asks = None if sample_kind is None else [sample_kind], None if ask is None else [ask]
    task = prompts.one_task(
        model,
        image,
        [prompt] if prompt is not None else None,
        [sample] if sample is not None else None,
        kinds,
        asks,
        allow_urls=allow_urls,
    )
    if not task.images:
        raise InputError("there is no image to show; give --image or --sample")
    options = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    loaded, inputs = prompts.load(model, [task], **options)
    with common.messages().status("generating"):
        result = shown(
            loaded.model, inputs[task.label], chosen, new_tokens=max_new_tokens, layers=layer, head=head,
            each=each_layer or bool(layer), steps=filmstrip is not None, to_the_end=ignore_eos,
        )  # fmt: skip
    images = image_columns(result.prompt, task.images)
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    texts = [tokenizer.decode([token]) for token in result.tokens]
    _print(result, images, tokenizer.decode(list(result.tokens), skip_special_tokens=True), task)
    if json is not None:
        data = {"question": task.question, "images": list(task.captions), **result.to_dict(images)}
        files.write_json(json, {**data, "environment": environment.describe(loaded.model)})
    if csv is not None:
        prompts.write_csv(csv, result.table_rows(images))
    _draw(result, task, texts, out, filmstrip, frames)
    common.say_written(json, csv, out, filmstrip)


def _print(result: Any, images: Any, answer: str, task: prompts.Task) -> None:
    from foveakv.util.texts import printable

    columns = [Column("", right=False), *map(Column, task.captions)]
    table = FittedTable(columns, title="share of each image's patches that is kept")
    for row in result.rows:
        table.add(row.label, *(f"{row.columns[own].mean():.0%}" for own in images))
    console = common.output()
    console.print(f"[bold]question[/bold]  {escape(task.question)}", highlight=False)
    console.print(f"[bold]answer[/bold]  {escape(printable(answer).strip())}", highlight=False)
    console.print(table)


def _draw(
    result: Any, task: prompts.Task, texts: list[str], out: Path | None, filmstrip: Path | None, frames: int
) -> None:
    if out is None and filmstrip is None:
        return
    from foveakv.analysis.viz_shown import draw_filmstrip, draw_rows

    title = f"{result.settings['method']}: {task.question}"
    if out is not None:
        draw_rows(out, task.images, result, captions=task.captions, title=title)
    if filmstrip is not None:
        draw_filmstrip(filmstrip, task.images, result, captions=task.captions, title=title, texts=texts, frames=frames)
