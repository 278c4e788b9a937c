#!/usr/bin/env bash
# tensordict 0.15.3: a numpy array of strings in a TensorDict is not a column; no index cuts it.
#
# A TensorDict cuts tensors, numeric arrays and lists of strings along its batch, so one expects the same of an array of strings
# with one element for each row. Such an array is kept as one value of the whole table: a slice, a mask and each part of `split`
# hold all of it, with the length of the old table, and nothing is raised. Rows and their names then no longer belong together. The
# same strings in a list are cut.
#
# Ends with 0 while tensordict behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "tensordict==0.15.3" "numpy==2.4.6"
cat >"$folder/names.py" <<'PY'
from importlib.metadata import version

import numpy as np
import torch
from tensordict import TensorDict

names = ["a", "b", "c"]
table = TensorDict({"x": torch.arange(3), "array": np.array(names), "list": names}, batch_size=[3])
last = table[2:]
found = [last["x"].tolist(), list(last["array"]), list(last["list"])]
print("the last of three rows: x", found[0], "array", found[1], "list", found[2])
print("tensordict", version("tensordict"))
raise SystemExit(found != [[2], names, ["c"]])
PY
"$folder/env/bin/python" "$folder/names.py"
# Seen on 2026-11-28, Python 3.11, x86-64:
# the last of three rows: x [2] array [np.str_('a'), np.str_('b'), np.str_('c')] list ['c']
