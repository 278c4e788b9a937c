#!/usr/bin/env bash
# transformers 5.24.0: three frames of a video cost Qwen3-VL more tokens than six, and the cap per frame raises the cost tenfold.
#
# Fewer frames should cost fewer tokens, and `cap_pixels_per_frame=True` reads as if it could only lower them. The processor shares
# one budget of pixels among all frames: with fewer frames each is larger, and numbers that are odd are counted as one more frame
# for the budget than they have. The cap is a share of another budget with a floor, so 64 frames of 480 x 640 cost 384 tokens
# without it and 4,160 with it, at the limits of the class. One frame is refused.
#
# Ends with 0 while transformers behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "transformers==5.24.0" "pillow==13.0.0" "numpy==2.4.6"
cat >"$folder/frames.py" <<'PY'
from types import SimpleNamespace

import transformers
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor


def tokens(frames, cap=None):
    own = {name: getattr(Qwen3VLVideoProcessor, name) for name in ("size", "patch_size", "merge_size", "temporal_patch_size")}
    settings = SimpleNamespace(**own, max_video_tokens=Qwen3VLVideoProcessor.max_video_tokens, cap_pixels_per_frame=cap)
    return Qwen3VLVideoProcessor.get_num_of_video_patches(settings, frames, 480, 640) // settings.merge_size**2


found = [tokens(3), tokens(6), tokens(64), tokens(64, cap=True)]
print("tokens of 3, 6 and 64 frames of 480 x 640:", found[:3], "of 64 with the cap:", found[3])
print("transformers", transformers.__version__)
raise SystemExit(found != [468, 351, 384, 4160])
PY
"$folder/env/bin/python" "$folder/frames.py"
# Seen on 2026-11-28, Python 3.11, x86-64:
# tokens of 3, 6 and 64 frames of 480 x 640: [468, 351, 384] of 64 with the cap: 4160
