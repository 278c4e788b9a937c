#!/usr/bin/env bash
# torch 2.13.0: the reader of Hugging Face checkpoints reads every safetensors file of the folder, whatever the index lists.
#
# `model.safetensors.index.json` says which file holds which tensor; transformers and vLLM read those files only. The reader of
# torch's distributed checkpoint does not look at it. A folder that an earlier save in more files has left its last file in gives
# the tensors of both: a name that only the old one has appears again, and of a name in both either may be loaded. Nothing warns.
#
# Ends with 0 while torch behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "safetensors==0.8.0" "numpy==2.4.6"
cat >"$folder/leftovers.py" <<'PY'
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

folder = Path(tempfile.mkdtemp())
save_file({"weight": torch.ones(2)}, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
save_file({"removed": torch.zeros(2)}, folder / "model-00002-of-00002.safetensors", {"format": "pt"})  # of the save before
listed = {"weight": "model-00001-of-00001.safetensors"}
(folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
found = sorted(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
print("listed by the index:", sorted(listed), "read:", found)
print("torch", torch.__version__)
raise SystemExit(found != ["removed", "weight"])
PY
"$folder/env/bin/python" "$folder/leftovers.py"
# Seen on 2026-11-28, Python 3.11, x86-64:
# listed by the index: ['weight'] read: ['removed', 'weight']
