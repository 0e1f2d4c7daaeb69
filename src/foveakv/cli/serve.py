"""`foveakv serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from foveakv.cli import common
from foveakv.cli.common import (
    BudgetOption,
    DebugOption,
    DeviceOption,
    DtypeOption,
    KVDtypeOption,
    MethodOption,
    ResidualLengthOption,
    TrustOption,
)
from foveakv.cli.prompts import SetOption
from foveakv.errors import InputError

KEY_VARIABLE = "FOVEAKV_API_KEY"


_VLLM_TOO = (
    "model", "method", "budget", "set_", "engine", "host", "port", "api_key", "served_model_name", "per_request",
    "allow_private_urls", "image_root", "vllm_arg", "print_command", "dtype", "trust_remote_code", "debug",
)  # fmt: skip


@common.friendly
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A local folder, a model id on the hub, or `demo` (the embedded model).")
    ] = "demo",
    method: MethodOption = "hybridkv",
    budget: BudgetOption = None,
    set_: SetOption = None,
    kv_dtype: KVDtypeOption = None,
    residual_length: ResidualLengthOption = 32,
    engine: Annotated[str, typer.Option(help="transformers (all methods), or vllm with the plugin.")] = "transformers",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name in the Host header to answer to. Repeat it for several.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help=f"Key that requests must bring. Better set {KEY_VARIABLE}: command lines are visible."),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name in requests; default: MODEL.")] = None,
    allow_methods: Annotated[
        str | None, typer.Option(help="Methods that requests may choose, separated by commas; default: all.")
    ] = None,
    per_request: Annotated[
        bool, typer.Option("--per-request/--no-per-request", help="Let requests choose method, budget and options.")
    ] = True,
    allow_options: Annotated[
        bool, typer.Option("--allow-options", help="Let requests set options of methods; for trusted clients.")
    ] = False,
    max_budget: Annotated[
        float | None, typer.Option(help="Largest share of the prompt that a request may choose to keep.")
    ] = None,
    allow_urls: Annotated[bool, typer.Option("--allow-urls", help="Fetch images from public http(s) URLs.")] = False,
    allow_private_urls: Annotated[
        bool, typer.Option("--allow-private-urls", help="Fetch from private addresses and any port too.")
    ] = False,
    image_root: Annotated[
        Path | None, typer.Option(help="Folder whose images may be given as file:// URLs; default: none.")
    ] = None,
    kv_bytes: Annotated[
        str | None, typer.Option(help="Bytes for all caches, such as 4GiB; default: half of the free memory.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get status 429.")] = 32,
    max_running: Annotated[int, typer.Option(min=1, help="Answers that are decoded together.")] = 32,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")] = 1024,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longest prompt; default: the model's.")] = None,
    max_choices: Annotated[int, typer.Option(min=1, help="Largest `n`.")] = 4,
    max_images: Annotated[int, typer.Option(min=1, help="Images of a request.")] = 16,
    max_image_bytes: Annotated[str, typer.Option(help="Encoded bytes of an image.")] = "10MiB",
    max_image_pixels: Annotated[int, typer.Option(min=1, help="Pixels of an image.")] = 20_000_000,
    max_total_pixels: Annotated[int, typer.Option(min=1, help="Pixels of all images of a request.")] = 64_000_000,
    max_body_bytes: Annotated[str, typer.Option(help="Bytes of a request.")] = "32MiB",
    request_seconds: Annotated[float, typer.Option(help="Longest time of a request, the queue included.")] = 600.0,
    vllm_arg: Annotated[
        list[str] | None, typer.Option(help="With --engine vllm: a further argument of vLLM. Repeat it for several.")
    ] = None,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="With --engine vllm: print the command instead of running it.")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    debug: DebugOption = False,
) -> None:
    """Serve a model with OpenAI's Chat Completions, metrics and a page to try it.

    Example: foveakv serve demo --method hybridkv --budget 0.1
    """
    from foveakv.cli.settings import build_method, parse_assignments, parse_budget_text

    build_method(method, budget, set_ or [])  # the command line is checked before anything is loaded
    options = parse_assignments(method, set_ or [])
    if budget is not None:
        options["budget"] = parse_budget_text(method, budget)
    key = api_key or os.environ.get(KEY_VARIABLE) or None
    if engine == "vllm":
        _refuse_others(context)
        from foveakv.serving.vllm_command import environment, vllm_command

        command = vllm_command(
            model, method=method, options=options, host=host, port=port, served_name=served_model_name,
            per_request=per_request, dtype=dtype, trust_remote_code=trust_remote_code, any_url=allow_private_urls,
            image_root=None if image_root is None else str(image_root.resolve()), more=vllm_arg or [],
        )  # fmt: skip
        _run_vllm(command, environment(key), print_command)
        return
    if engine != "transformers":
        raise InputError(f"--engine is transformers or vllm, not {engine}")
    if vllm_arg or print_command:
        raise InputError("--vllm-arg and --print-command belong to --engine vllm")
    policy = {
        "method": method, "options": options, "kv_dtype": kv_dtype, "residual_length": residual_length,
        "allowed": None if allow_methods is None else tuple(_names(allow_methods)), "max_budget": max_budget,
        "per_request": per_request, "allow_options": allow_options,
    }  # fmt: skip
    limits = {
        "kv_bytes": None if kv_bytes is None else _bytes("--kv-bytes", kv_bytes), "max_queue": max_queue,
        "max_running": max_running, "max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens,
        "max_choices": max_choices, "max_images": max_images, "max_total_pixels": max_total_pixels,
        "max_image_bytes": _bytes("--max-image-bytes", max_image_bytes), "max_image_pixels": max_image_pixels,
        "max_body_bytes": _bytes("--max-body-bytes", max_body_bytes), "request_seconds": request_seconds,
    }  # fmt: skip
    images = {"allow_urls": allow_urls or allow_private_urls, "allow_private_urls": allow_private_urls}
    loading = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    address = host, port, tuple(allow_host or ())
    _serve_here(
        model, policy, limits, {**images, "root": image_root}, address, key, served_model_name or model, loading
    )


def _serve_here(
    model: str,
    policy: dict[str, Any],
    limits: dict[str, Any],
    images: dict[str, Any],
    address: tuple[str, int, tuple[str, ...]],
    key: str | None,
    name: str,
    loading: dict[str, Any],
) -> None:
    from foveakv.serving import server
    from foveakv.serving.choice import Policy
    from foveakv.serving.images import ImageReader
    from foveakv.serving.limits import Limits

    host, port, more_hosts = address
    rules, bounds = Policy(**policy), Limits(**limits)
    if images["root"] is not None and not images["root"].is_dir():
        raise InputError(f"--image-root: there is no folder {images['root']}")
    socket = server.listen(host, port)
    loaded = common.load_model(model, **loading)
    service = server.build_service(
        loaded, name, policy=rules, limits=bounds, images=ImageReader(bounds, **images), is_demo=model == "demo"
    )
    app = server.create_app(service, api_key=key, hosts=server.hosts_for(host, more_hosts))
    say = common.messages()
    if key is None and not server.is_loopback(host):
        say.print(f"warning: {host} can be reached by others, and there is no --api-key", highlight=False)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{socket.getsockname()[1]}"
    say.print(f"{name} on {url} (page), {url}/v1 (API); Ctrl-C stops", highlight=False, soft_wrap=True)
    server.make_server(app).run(sockets=[socket])


def _run_vllm(command: list[str], environment: dict[str, str], print_command: bool) -> None:
    import shlex

    from foveakv.serving.vllm_command import check_installed

    if print_command:
        typer.echo(shlex.join(command))
        return
    check_installed()
    os.execve(command[0], command, environment)  # signals then reach the server, and its exit code is the command's


def _refuse_others(context: typer.Context) -> None:
    """Refuse options of the command line that would have no effect on vLLM."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in _VLLM_TOO and source is not None and source.name == "COMMANDLINE":
            option = name.rstrip("_").replace("_", "-")
            raise InputError(
                f"--{option} belongs to --engine transformers; vLLM has options of its own, see --vllm-arg"
            )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _bytes(option: str, text: str) -> int:
    """A number of bytes, such as 1048576, 64MiB or 4GB."""
    from foveakv.core.budget import parse_budget
    from foveakv.errors import BudgetError

    try:
        found = parse_budget(int(text) if text.isdigit() else text)
    except (BudgetError, ValueError):  # ValueError: Python converts no text of thousands of digits
        found = None
    if found is None or found.kind == "ratio" or int(found.value) < 1:
        raise InputError(f"{option}: {text[:40]} is no number of bytes such as 67108864 or 64MiB")
    return int(found.value)
