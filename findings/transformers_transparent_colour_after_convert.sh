#!/usr/bin/env bash
# transformers 5.24.0 with Pillow 13.0.0: a picture that was converted to RGB loses every pixel of its former transparent colour.
#
# After `.convert("RGB")` a picture has no transparency, so one expects a processor to see what a viewer shows. Pillow leaves the
# transparent colour in `info`, and transformers (from 5.21 on) takes that entry for transparency of the RGB picture and lays it on
# white. In a drawing of black lines whose transparent palette entry is black too, as scans often have, the lines vanish: the model
# gets a white page. No warning is printed. `datasets.Image(mode="RGB")` converts in the same way.
#
# Ends with 0 while they behave so, with 1 once they do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "transformers==5.24.0" "pillow==13.0.0" "numpy==2.4.6"
cat >"$folder/drawing.py" <<'PY'
import io

import numpy as np
import PIL
import transformers
from PIL import Image
from transformers.image_transforms import convert_to_rgb

drawing = Image.new("P", (2, 1))  # the left pixel is the transparent ground, the right one a line
drawing.putpalette([0, 0, 0, 0, 0, 0])
drawing.putpixel((1, 0), 1)
file = io.BytesIO()
drawing.save(file, "PNG", transparency=0)

converted = Image.open(file).convert("RGB")
seen = np.asarray(convert_to_rgb(converted, return_numpy=True)).reshape(-1)
copied = Image.fromarray(np.asarray(converted))  # the same pixels, without the entry
again = np.asarray(convert_to_rgb(copied, return_numpy=True)).reshape(-1)
print("pixels after convert('RGB'):", np.asarray(converted)[0].tolist(), "info:", converted.info)
print("what a processor sees of them:", sorted(set(seen.tolist())), "of a copy:", sorted(set(again.tolist())))
print("transformers", transformers.__version__, "Pillow", PIL.__version__)
raise SystemExit(not (set(seen.tolist()) == {255} and set(again.tolist()) == {0}))
PY
"$folder/env/bin/python" "$folder/drawing.py"
# Seen on 2026-11-28, Python 3.11, x86-64:
# pixels after convert('RGB'): [[0, 0, 0], [0, 0, 0]] info: {'transparency': (0, 0, 0)}
# what a processor sees of them: [255] of a copy: [0]
