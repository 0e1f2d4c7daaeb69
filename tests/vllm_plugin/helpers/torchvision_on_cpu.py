"""Lets the CUDA build of torchvision import beside a CPU build of torch.

vLLM's processors for images need torchvision, and package indexes offer its CPU build rarely. The import fails because
two operators that its Python code refers to are defined in a library that cannot be loaded; this hook defines their
schemas first. Resizing and normalizing work then, reading image files by torchvision does not.

Installed in an environment by a .pth file with the line `import torchvision_on_cpu`.
"""

import importlib.abc
import sys

_libraries = []


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Defines the operators when torchvision is about to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
