"""`foveakv show`: the pictures with kept patches bright and dropped ones dark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from foveakv.cli import common, prompts
from foveakv.cli.common import (
    DebugOption,
    DeviceOption,
    DtypeOption,
    ImagesOption,
    ModelOption,
    PromptOption,
    TokensOption,
    TrustOption,
)
from foveakv.cli.prompts import CsvOption, JsonOption, SetOption
from foveakv.errors import InputError
from foveakv.util import files


@common.friendly
def show(
    model: ModelOption = "demo",
    image: ImagesOption = None,
    prompt: PromptOption = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Use the embedded model's sample prompt with this many pictures instead.")
    ] = None,
    sample_kind: Annotated[
        str | None, typer.Option(help="What sample pictures show: digit (default), number or word.")
    ] = None,
    ask: Annotated[int | None, typer.Option(help="The sample card that is asked for, from 0, -1 for all.")] = None,
    method: Annotated[str, typer.Option(help="A method, see `foveakv methods`.")] = "hybridkv",
    budget: Annotated[str | None, typer.Option("--budget", "-b", help="0.1, 10%, 1024, 512MiB.")] = None,
    set_: SetOption = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", min=0, help="A row for this layer; repeat it for more.")
    ] = None,
    each_layer: Annotated[bool, typer.Option("--each-layer", help="A row for every layer.")] = False,
    head: Annotated[int | None, typer.Option("--head", min=0, help="This KV head only; else the mean of all.")] = None,
    max_new_tokens: TokensOption = 16,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate all tokens, past the end of the answer.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Draw the pictures into this file.")] = None,
    filmstrip: Annotated[
        Path | None, typer.Option("--filmstrip", help="Draw what each decode step attends to into this file.")
    ] = None,
    frames: Annotated[int, typer.Option(min=1, help="Rows of the filmstrip at most, evenly spaced.")] = 8,
    json: JsonOption = None,
    csv: CsvOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Show which patches of the pictures a method keeps, and from one decode step to the next.

    Example: foveakv show --sample 8 --ask -1 --budget 0.2 --out kept.png --filmstrip steps.png
    """
    from foveakv.analysis.shown import shown
    from foveakv.cli.settings import build_method
    from foveakv.core.patches import image_columns
    from foveakv.evaluation import environment

    files.check_output_files(out, filmstrip, json, csv)
    common.check_pictures(out, filmstrip)
    if not any((out, filmstrip, json, csv)):
        raise InputError("say where the result goes: --out, --filmstrip, --json or --csv")
    chosen = build_method(method, budget, set_ or [])
    kinds, asks = None if sample_kind is None else [sample_kind], None if ask is None else [ask]
    task = prompts.one_task(
        model, image, [prompt] if prompt is not None else None, [sample] if sample is not None else None, kinds, asks
    )
    if not task.pictures:
        raise InputError("there is no picture to show; give --image or --sample")
    options = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    loaded, inputs = prompts.load(model, [task], **options)
    with common.messages().status("generating"):
        result = shown(
            loaded.model, inputs[task.label], chosen, new_tokens=max_new_tokens, layers=layer, head=head,
            each=each_layer or bool(layer), steps=filmstrip is not None, to_the_end=ignore_eos,
        )  # fmt: skip
    images = image_columns(result.prompt, task.pictures)
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    texts = [tokenizer.decode([token]) for token in result.tokens]
    _print(result, images, tokenizer.decode(list(result.tokens), skip_special_tokens=True), task)
    if json is not None:
        data = {"question": task.question, "images": list(task.captions), **result.to_dict(images)}
        files.write_json(json, {**data, "environment": environment.describe(loaded.model)})
    if csv is not None:
        prompts.write_csv(csv, result.table_rows(images))
    _draw(result, task, texts, out, filmstrip, frames)
    for path in (json, csv, out, filmstrip):
        if path is not None:
            common.say_written(path)


def _print(result: Any, images: Any, answer: str, task: prompts.Task) -> None:
    from foveakv.util.texts import printable

    table = Table(title="share of each picture's patches that is kept", title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(["", *task.captions]):
        table.add_column(escape(name), justify="right" if i else "left")
    for row in result.rows:
        table.add_row(escape(row.label), *(f"{row.columns[own].mean():.0%}" for own in images))
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
        with files.replacing(out) as temporary:
            draw_rows(temporary, task.pictures, result, captions=task.captions, title=title)
    if filmstrip is not None:
        with files.replacing(filmstrip) as temporary:
            draw_filmstrip(
                temporary, task.pictures, result, captions=task.captions, title=title, texts=texts, frames=frames
            )
