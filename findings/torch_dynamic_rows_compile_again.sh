#!/usr/bin/env bash
# torch 2.13.0, CPU: a size that is marked as dynamic is still compiled twice, below and above 4,096.
#
# `mark_dynamic` promises one code for all sizes of a dimension, and raises an error if the compiler specialises it to one number.
# A range is not a number: where a float32 sum runs over that dimension, the C++ backend keeps partial sums above 4,096 elements
# and none below, decides that by a guard on the size, and dynamo compiles the whole function again at the first call on the other
# side. A training step whose batch first exceeds 4,096 rows after many steps then stops for a compilation that no warm-up with
# smaller batches has shown. (On GPUs torch 2.11 and later do the same at other sizes for the gradients of norms.)
#
# Needs a C++ compiler. Ends with 0 while torch behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0"
cat >"$folder/sizes.py" <<'PY'
import torch
from torch._dynamo.utils import counters


@torch.compile
def total(x):
    return (x * x).sum(0)


found = []
for rows in (100, 3000, 4096, 4097, 9000, 200):
    x = torch.ones(rows, 64)
    torch._dynamo.mark_dynamic(x, 0)
    assert total(x)[0] == rows
    found.append(counters["stats"]["unique_graphs"])
    print(f"{rows:5} rows: {found[-1]} compiled so far")
print("torch", torch.__version__)
raise SystemExit(found != [1, 1, 1, 2, 2, 2])
PY
TORCHINDUCTOR_CACHE_DIR=$folder/cache "$folder/env/bin/python" "$folder/sizes.py"
# Seen on 2026-11-27, Python 3.11, x86-64:
#   100 rows: 1 compiled so far
#  3000 rows: 1 compiled so far
#  4096 rows: 1 compiled so far
#  4097 rows: 2 compiled so far
#  9000 rows: 2 compiled so far
#   200 rows: 2 compiled so far
