"""Which methods of a model are wrapped while it is attached, and the attachment of each model."""

from __future__ import annotations

import weakref

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.attachment import Attachment, lock
from foveakv.engines.transformers.compiled import wrap_get_compiled_call
from foveakv.engines.transformers.copies import wrap_reduce
from foveakv.engines.transformers.forward import wrap_forward
from foveakv.engines.transformers.generate import wrap_generate
from foveakv.errors import UnsupportedModelError
from foveakv.methods import Method

WRAPS = {
    "forward": wrap_forward,
    "generate": wrap_generate,
    "get_compiled_call": wrap_get_compiled_call,
    "__reduce_ex__": wrap_reduce,
}
_attachments: weakref.WeakKeyDictionary[compat.PreTrainedModel, Attachment] = weakref.WeakKeyDictionary()


def attachment_of(model: compat.PreTrainedModel) -> Attachment:
    """The model's attachment, made on first use; the model is unchanged before `Attachment.hold`.

    Raises:
        UnsupportedModelError: `model` is not a transformers model.
    """
    if not isinstance(model, compat.PreTrainedModel):
        raise UnsupportedModelError(f"expected a transformers model, got {type(model).__name__}")
    with lock:
        if model not in _attachments:
            _attachments[model] = Attachment(model, WRAPS)
        return _attachments[model]


def models_using(method: Method) -> list[compat.PreTrainedModel]:
    """The models with an open session that uses this very method object."""
    with lock:
        return [model for model, held in _attachments.items() if any(s.given is method for s in held.sessions)]
