"""Configurations of vLLM that the plugin does not support are errors at start, and so are invalid settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import pytest
import tiny_checkpoints

from foveakv.engines.vllm import private
from foveakv.errors import FoveaKVError

OFF = engines.transfer_config("off")
CASES: list[tuple[dict[str, Any], str]] = [
    ({"enable_prefix_caching": True}, "enable_prefix_caching=False"),
    ({"kv_transfer_config": {**OFF, "kv_load_failure_policy": "recompute"}}, "kv_load_failure_policy"),
    ({"kv_transfer_config": engines.transfer_config("snapkv")}, "one block table"),
    ({"kv_transfer_config": engines.transfer_config("random", budgets=3)}, "no option 'budgets'"),
    ({"kv_transfer_config": engines.transfer_config("hae", ddes=False, score_layer=9)}, "layer 9"),
    (
        {
            "kv_transfer_config": {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [engines.transfer_config("random")]},
            }
        },
        "MultiConnector",
    ),
]


@pytest.mark.parametrize(("given", "message"), CASES, ids=[message for _, message in CASES])
def test_refused_at_start(checkpoints: Path, given: dict[str, Any], message: str) -> None:
    path = tiny_checkpoints.checkpoint("tiny-llava", checkpoints)
    with pytest.raises(FoveaKVError, match=message), engines.engine(path, None, **{"kv_transfer_config": OFF, **given}):
        pass
    engines.clean()


def test_versions() -> None:
    assert private.tested(private.version())
    assert private.tested("0.32.1+cpu")
    assert not private.tested("0.33.0")
    private.check()
    private.register()
    private.register()
