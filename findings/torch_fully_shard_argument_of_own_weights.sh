#!/usr/bin/env bash
# torch 2.13.0: fully_shard drops, without a word, the gradient of weights by which an argument of the module was computed.
#
# `FSDPModule.unshard()` gathers weights so that code outside of a module's forward can use them, and the weights of a root stay
# gathered until its backward pass has ended. So one expects that a part of the root can be computed ahead (pictures encoded by
# its projector, say) and handed to the root's forward as an argument, with the gradient that it has without sharding. But FSDP
# takes the gradient of an argument for the end of the module's own backward pass: it reduces the gradients that are there, and
# frees the gathered weights. The gradient of the projector comes after that, stays with the freed weights, and `.grad` is None
# when the optimizer steps. Where the projector's own input needs a gradient too, the backward pass fails instead, because the
# weight is gone. Tensors in dataclasses are found as well; one in an object of another class is not, and then all is right.
#
# Compares the gradient of a projector over two processes with that of the module alone. Ends with 0 while torch behaves so, with
# 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat >"$folder/argument.py" <<'PY'
import sys
from dataclasses import dataclass

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class Record:
    features: torch.Tensor


class Holder:
    def __init__(self, features):
        self.features = features


WAYS = {"tensor": lambda features: features, "dataclass": Record, "other object": Holder}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.projector, self.layer = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, given):
        return self.layer(given if isinstance(given, torch.Tensor) else given.features)


def projector_gradient(way, sharded):
    torch.manual_seed(0)
    model = Model()
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.unshard()
    features = model.projector(torch.arange(16.0).view(2, 8) / 16)
    model(WAYS[way](features)).square().sum().backward()
    gradient = model.projector.weight.grad
    return gradient.full_tensor() if sharded and gradient is not None else gradient


def run(rank, file, found):
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for way in WAYS:
        gradient, expected = projector_gradient(way, sharded=True), projector_gradient(way, sharded=False)
        right = gradient is not None and torch.allclose(gradient, expected)
        if rank == 0:
            found[way] = "none" if gradient is None else "right" if right else "wrong"
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    with multiprocessing.Manager() as manager:
        found = manager.dict()
        multiprocessing.spawn(run, args=(sys.argv[1], found), nprocs=2)
        print(torch.__version__, dict(found))
        sys.exit(dict(found) != {"tensor": "none", "dataclass": "none", "other object": "right"})
PY
"$folder/env/bin/python" "$folder/argument.py" "$folder/rendezvous"
