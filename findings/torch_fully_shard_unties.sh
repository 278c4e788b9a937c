#!/usr/bin/env bash
# torch 2.13.0: `fully_shard` of a tied embedding by itself unties it from the head, silently.
#
# Wrapping the embedding, the layers and then the root is the usual recipe of FSDP2, and tied weights are one parameter, which one
# expects to stay one. `fully_shard` replaces the parameters of the module that it gets by sharded ones; the head keeps the old
# tensor, which the root then shards as a parameter of its own. Both start equal and each learns from its own gradient, so that the
# model drifts from the one that was configured, and a checkpoint stores one of the two. Wrapped with the root only, they stay tied.
#
# Ends with 0 while torch behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat >"$folder/tied.py" <<'PY'
import tempfile

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


distributed.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
mesh, found = init_device_mesh("cpu", (1,)), {}
for alone in (False, True):
    model = Model()
    if alone:
        fully_shard(model.embedding, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found[alone] = model.head.weight is model.embedding.weight
print("tied, if the root is wrapped:", found[False], "and if the embedding is wrapped first:", found[True])
print("torch", torch.__version__)
distributed.destroy_process_group()
raise SystemExit(found != {False: True, True: False})
PY
"$folder/env/bin/python" "$folder/tied.py"
# Seen on 2026-11-28, Python 3.11, x86-64:
# tied, if the root is wrapped: True and if the embedding is wrapped first: False
