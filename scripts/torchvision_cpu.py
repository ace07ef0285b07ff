"""Import hook that makes a CUDA build of torchvision importable beside the CPU build of torch.

scripts/setup.sh copies this module into .venv, where a .pth file imports it whenever Python starts. transformers and
vLLM import torchvision for images, but the package index has only a CUDA build for x86-64. Its import fails, because
its compiled operators cannot be loaded ("operator torchvision::nms does not exist"). The hook declares the operators
that the import looks up. They have no implementation, and reading images does not call them.
"""

import sys

libraries = []  # keeps the declared operators alive


class TorchvisionFinder:
    """Finder that declares operators when torchvision is about to be imported, and leaves the import to others."""

    def find_spec(self, fullname, path, target=None):
        if fullname == "torchvision":
            import importlib.machinery  # here, because every start of Python imports this module
            import pathlib

            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            version = pathlib.Path(spec.origin).with_name("version.py").read_text() if spec else ""
            import torch

            if torch.version.cuda is None and "+cu" in version:
                libraries.append(torch.library.Library(fullname, "DEF"))
                for name in ("nms", "qnms"):
                    libraries[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            return spec
        return None


if __name__ == "torchvision_cpu":  # as a module of .venv
    sys.meta_path.insert(0, TorchvisionFinder())
