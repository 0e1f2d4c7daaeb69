"""What the commands share: options, errors on one line, loading, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from foveakv.errors import FoveaKVError, InputError, MissingDependencyError

EXIT_CODE = 2

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="A folder, a model id of the hub, or `demo` (the embedded model).")
]
ImagesOption = Annotated[list[str] | None, typer.Option("--image", "-i", help="A picture; repeat it for more.")]
PromptOption = Annotated[
    str | None,
    typer.Option("--prompt", "-p", help="The question. `<image>` marks where each picture goes; else they come first."),
]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="The longest answer, in tokens.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... (default: cuda where there is one).")]
DtypeOption = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16 (default: as the model is loaded).")
]
KVDtypeOption = Annotated[
    str | None,
    typer.Option("--kv-dtype", help="int8 or int4: store slots as codes of 8 or 4 bits (default: as they are)."),
]
ResidualLengthOption = Annotated[
    int,
    typer.Option("--residual-length", min=0, help="With --kv-dtype: so many of the newest slots per head stay exact."),
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model. Off unless you say so.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def output() -> Console:
    """For results. In a file or pipe lines may be longer than the 80 columns that rich assumes there."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def messages() -> Console:
    """Progress and errors go to stderr, so that stdout holds the answer alone."""
    return Console(stderr=True)


def friendly(command: Callable[..., None]) -> Callable[..., None]:
    """Turns the project's errors into one line and exit code 2; `--debug` lets them through."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except FoveaKVError as error:
            if kwargs.get("debug"):
                raise
            messages().print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(EXIT_CODE) from None

    return guarded


def load_model(name: str, *, device: str | None, dtype: str | None, trust_remote_code: bool) -> Any:
    """Model and processor, with a line that says what is going on."""
    quiet_transformers()
    from foveakv import models

    # The embedded model draws its own bar when it has to be put together, and two live displays do not mix.
    what = "the embedded model (put together on first use)" if name == models.DEMO else name
    with contextlib.nullcontext() if name == models.DEMO else messages().status(f"loading {escape(what)}"):
        if name == models.DEMO:
            messages().print(f"loading {what}", highlight=False)
        return models.load(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)


def quiet_transformers() -> None:
    """Keeps transformers' notices and progress bars out of the command's own output; errors stay."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


_PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp")


def check_pictures(*paths: Path | None) -> None:
    """Fails before any work when a plot could not be drawn later."""
    wanted = [path for path in paths if path is not None]
    for path in wanted:
        if path.suffix.lower() not in _PICTURES:
            raise InputError(f"{path}: the name of a picture ends in one of {', '.join(_PICTURES)}")
    if wanted and importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("plots need matplotlib: pip install 'foveakv[demo]'")


def say_written(path: Path) -> None:
    """Names a file that was written, letter by letter: brackets in it are no markup."""
    messages().print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
