"""Shared by all commands: options, one-line errors, consoles, and loading a model."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from foveakv.errors import FoveaKVError, InputError, MissingDependencyError
from foveakv.util.texts import printable

EXIT_CODE = 2
"""Exit code of a command that stops with an error."""

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

SOME_FAILED = 1
"""Exit code of a command that finished with errors in some of its results."""

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="A local folder, a model id on the hub, or `demo` (the embedded model).")
]
ImagesOption = Annotated[
    list[str] | None, typer.Option("--image", "-i", help="An image file, or base64. Repeat it for several images.")
]
AllowUrlsOption = Annotated[bool, typer.Option("--allow-urls", help="Fetch images that are given as http(s) URLs.")]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt", "-p", help="The question. `<image>` marks the place of each image; without it, images come first."
    ),
]
TokensOption = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=1, help="Maximum number of tokens to generate.")
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue after the end of the answer, up to --max-new-tokens.")
]
MethodOption = Annotated[str, typer.Option(help="A method; `foveakv methods` lists them.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget", "-b",
        help="0.1 or 10% (share of the prompt), 1024 (tokens per head), 512MiB (whole cache); default: the method's.",
    ),
]  # fmt: skip
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... (default: cuda if available).")]
DtypeOption = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16 (default: float32 on a CPU, else the stored dtype).")
]
KVDtypeOption = Annotated[
    str | None, typer.Option("--kv-dtype", help="int8 or int4: quantize the cache (default: the model's dtype).")
]
ResidualLengthOption = Annotated[
    int,
    typer.Option(
        "--residual-length", min=0, help="With --kv-dtype: number of newest slots per head kept in full precision."
    ),
]
ChunkOption = Annotated[
    int | None,
    typer.Option(
        "--prefill-chunk", min=1, help="Read the prompt in chunks of this many tokens, each compressed when it is read."
    ),
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model (default: off).")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def output() -> Console:
    """The console for results, on stdout. Without a terminal the width is $COLUMNS, or 110."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=110)


def messages() -> Console:
    """The console for progress and errors, on stderr, so that stdout holds the results alone."""
    return Console(stderr=True)


def friendly(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: a user's mistake or a failing system call becomes one line on stderr and exit code 2.

    With `--debug` the exception passes; the command's parameter for it must be named `debug`. A broken pipe
    (`foveakv ... | head`) passes too: typer ends with exit code 1.
    """

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            flush_stdout()
        except Exception as error:
            text = error_text(error)
            if text is None or kwargs.get("debug"):
                raise
            fail(text)

    return guarded


def error_text(error: Exception) -> str | None:
    """The line for an error that is not a bug; None for a bug or a broken pipe."""
    if isinstance(error, FoveaKVError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, OSError):
        # Output files have errors of their own, so a full disk without a name is that of a redirected stdout.
        where = error.filename or ("standard output" if error.errno in _WRITE_ERRORS else None)
        return f"{where}: {error.strerror}" if where else str(error)
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return f"out of memory: {error}".split("\n")[0].rstrip(": ")
    return None


def fail(text: str, code: int = EXIT_CODE) -> None:
    """Print an error on stderr and end the command. Raises typer.Exit."""
    with contextlib.suppress(OSError):  # stderr is full or closed; the exit code remains
        line = f"[bold red]error:[/bold red] {escape(printable(text))}"
        messages().print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(code) from None


def flush_stdout() -> None:
    """Write out what is buffered. OSError: stdout is full or its reader has gone."""
    if sys.stdout is not None:
        sys.stdout.flush()


def load_model(name: str, *, device: str | None, dtype: str | None, trust_remote_code: bool) -> Any:
    """Load model and processor, with a status line on stderr. Errors: see `foveakv.load`."""
    quiet_transformers()
    from foveakv import models

    # The embedded model draws its own bar when it is assembled, and two live displays cannot be mixed.
    what = "the embedded model (assembled on first use)" if name == models.DEMO else name
    with contextlib.nullcontext() if name == models.DEMO else messages().status(f"loading {escape(what)}"):
        if name == models.DEMO:
            messages().print(f"loading {what}", highlight=False)
        return models.load(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)


def quiet_transformers() -> None:
    """Silence transformers' notices and progress bars; its errors stay."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


_PLOTS = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp")


def check_plot_files(*paths: Path | None) -> None:
    """Check before any work that plots can be drawn. InputError: a file type; MissingDependencyError: matplotlib."""
    wanted = [path for path in paths if path is not None]
    for path in wanted:
        if path.suffix.lower() not in _PLOTS:
            raise InputError(f"{path}: the name of a plot ends in one of {', '.join(_PLOTS)}")
    if wanted and importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("plots need matplotlib: pip install 'foveakv[demo]'")


def say_written(*paths: Path | None) -> None:
    """Name the files that were written, on stderr."""
    for path in paths:
        if path is not None:
            messages().print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
