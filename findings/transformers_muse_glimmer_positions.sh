#!/usr/bin/env bash
# transformers 5.23.0 and 5.24.0 give the patches of an image that is not square other learned positions in Muse Glimmer's tower.
#
# The tower interpolates a square table of positions to the rows and columns of an image. 5.23 gives the patch in row r and column c
# the table's position at that row and column. 5.24 computes the positions of an image with height and width exchanged, and hands
# them out in reading order: the first row of 4 x 8 patches gets the first two rows of positions of 8 x 4. Square images are as before.
# A published model does not change between two releases, so one expects equal features; nothing is printed, and log-probs of rows with
# wide or tall pictures differ between them.
#
# Ends with 0 while 5.23.0 and 5.24.0 behave so, with 1 once one of them does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat >"$folder/positions.py" <<'PY'
from sys import argv

import torch
import transformers
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerVisionConfig
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerVisionPatchEmbedder

SIDE = 8  # rows and columns of the table of positions
config = MuseGlimmerVisionConfig(hidden_size=8, patch_size=2, pos_emb_height=SIDE, pos_emb_width=SIDE)
embedder = MuseGlimmerVisionPatchEmbedder(config)
table = torch.zeros(SIDE * SIDE, 8)
table[:, 0], table[:, 1] = torch.arange(SIDE).repeat_interleave(SIDE), torch.arange(SIDE).repeat(SIDE)  # row and column
with torch.no_grad():
    embedder.position_embedding_table.weight.copy_(table)


def first_row(rows, columns):
    pixels = torch.zeros(rows * columns, embedder.patch_embedding.in_features)  # they add nothing
    with torch.no_grad():
        found = embedder(pixels, torch.tensor([[1, rows, columns]]))
    return [tuple(place) for place in found[:columns, :2].tolist()]


wide, square = first_row(4, 8), first_row(8, 8)
print("transformers", transformers.__version__, "positions of the first row of 4 x 8 patches:", wide)
by_column = [(0.5, float(column)) for column in range(8)]
in_reading_order = [(row, column) for row in (0.0, 1.0) for column in (0.5, 2.5, 4.5, 6.5)]
as_seen = {"5.23.0": by_column, "5.24.0": in_reading_order}[argv[1]]
raise SystemExit(wide != as_seen or square != [(0.0, float(column)) for column in range(8)])
PY
for version in 5.23.0 5.24.0; do
    "$folder/env/bin/pip" install --quiet "torch==2.13.0" "transformers==$version" pillow
    HF_HUB_OFFLINE=1 "$folder/env/bin/python" "$folder/positions.py" "$version"
done
# Seen on 2026-11-28, Python 3.11, x86-64:
# transformers 5.23.0 positions of the first row of 4 x 8 patches: [(0.5, 0.0), (0.5, 1.0), (0.5, 2.0), (0.5, 3.0), (0.5, 4.0), ...]
# transformers 5.24.0 positions of the first row of 4 x 8 patches: [(0.0, 0.5), (0.0, 2.5), (0.0, 4.5), (0.0, 6.5), (1.0, 0.5), ...]
