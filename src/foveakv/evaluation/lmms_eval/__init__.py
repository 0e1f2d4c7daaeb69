"""FoveaKV as a model of lmms-eval: `python -m lmms_eval --model foveakv --model_args pretrained=MODEL,method=hae ...`.

lmms-eval finds the model through this package's entry point. docs/lmms-eval.md has the arguments.
"""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """What lmms-eval's registry asks for: the model's name and where its class is."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="foveakv", chat_class_path="foveakv.evaluation.lmms_eval.model.FoveaKV")
