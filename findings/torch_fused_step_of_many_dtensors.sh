#!/usr/bin/env bash
# torch 2.13.0: the first step of a fused AdamW over DTensors takes torch a time that grows as the square of their number.
#
# `torch.optim.AdamW(fused=True)` hands all parameters of a group to one operation, so that a step costs a few launches however
# many parameters there are, and one expects the host's work to grow with their number. In the first step torch finds out how the
# operation is sharded: for each of the N parameters it walks through the arguments of the operation, which are five lists of N
# DTensors and a list of N steps. 720 parameters, about those of a model of 7B, take 2 s on one core, and 2,000 would take 15.
# Later steps find the answer by their arguments. In groups of 64 the first step of 720 takes 0.1 to 0.2 s, because each answer
# costs less and equal groups share one; later steps take no longer.
#
# Counts the calls of Python functions in the first step. Ends with 0 while torch behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat >"$folder/step.py" <<'PY'
import os
import sys
import time

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def optimizer_of(number, in_a_group):
    weights = [torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])) for _ in range(number)]
    groups = [{"params": weights[first : first + in_a_group]} for first in range(0, number, in_a_group)]
    return weights, torch.optim.AdamW(groups, lr=1e-3, fused=True)


def calls(number, in_a_group):
    """Calls of Python functions in the first step, and in the second one."""
    weights, optimizer = optimizer_of(number, in_a_group)
    found = []
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        count = 0

        def note(frame, event, argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(note)
        optimizer.step()
        sys.setprofile(None)
        found.append(count)
    return found


def seconds(number, in_a_group):
    weights, optimizer = optimizer_of(number, in_a_group)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    begun = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - begun


calls(2, 2)  # what torch imports and keeps at its very first call
table = {number: (calls(number, number), calls(number, 30)) for number in (60, 120, 240)}
for number, (together, in_parts) in table.items():
    print(f"{number} parameters: calls in the first and second step {together}, in groups of 30 {in_parts}")
print(f"720 parameters: first step {seconds(720, 720):.2f} s, in groups of 64 {seconds(720, 64):.2f} s")
print("torch", torch.__version__)
growth = [table[2 * number][0][0] / table[number][0][0] for number in (60, 120)]
parts_cost_less = all(in_parts[0] < together[0] / 2 for together, in_parts in table.values())
torch.distributed.destroy_process_group()
raise SystemExit(not (growth[0] > 3 and growth[1] > 3 and parts_cost_less))
PY
"$folder/env/bin/python" "$folder/step.py"
# Seen on 2026-11-30, Python 3.11, x86-64:
# 60 parameters: calls in the first and second step [333946, 2591], in groups of 30 [120327, 2632]
# 120 parameters: calls in the first and second step [1062946, 5111], in groups of 30 [9554, 5234]
# 240 parameters: calls in the first and second step [3708946, 10151], in groups of 30 [19078, 10438]
# 720 parameters: first step 2.41 s, in groups of 64 0.09 s
# torch 2.13.0+cpu
