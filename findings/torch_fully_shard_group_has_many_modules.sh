#!/usr/bin/env bash
# torch 2.13: each module of a group of `fully_shard` is an `FSDPModule`, and what one of them is told holds for all.
#
# `fully_shard([a, b, c])` puts three modules into one group, whose weights are gathered by one collective. The documents of
# `FSDPModule` speak of "the module's parameters", so one expects `a.unshard()` to gather those of `a`, and a loop over all FSDPModules
# of a model to visit each group once: to add up the bytes that are gathered, say, or to count collectives. All three are FSDPModules
# with the same state: `a.unshard()` gathers the weights of `c` too, `c.reshard()` takes those of `a` away again, and such a loop
# visits the group three times.
#
# Ends with 0 while torch behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat >"$folder/group.py" <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
fully_shard(list(model[:3]), mesh=mesh)
fully_shard(model, mesh=mesh)


def sharded():
    return [isinstance(layer.weight, DTensor) for layer in model[:3]]


states = [sharded()]
model[0].unshard()
states.append(sharded())
model[2].reshard()
states.append(sharded())
modules = sum(isinstance(module, FSDPModule) for module in model.modules())
print(f"{modules} FSDPModules in two groups: three layers together, and the rest of the model")
print("sharded: at rest", states[0], "after the first one's unshard()", states[1], "after the third one's reshard()", states[2])
print("torch", torch.__version__.partition("+")[0])
dist.destroy_process_group()
raise SystemExit((modules, states) != (4, [[True] * 3, [False] * 3, [True] * 3]))
PY
"$folder/env/bin/python" "$folder/group.py"
