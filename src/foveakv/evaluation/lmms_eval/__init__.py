"""FoveaKV as a model of lmms-eval: `python -m lmms_eval --model foveakv --model_args pretrained=MODEL,method=hae ...`.

lmms-eval finds the model through an entry point of this package. See docs/lmms-eval.md for the arguments.
"""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """The entry for lmms-eval's registry: the name of the model and the path of its class."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="foveakv", chat_class_path="foveakv.evaluation.lmms_eval.model.FoveaKV")
