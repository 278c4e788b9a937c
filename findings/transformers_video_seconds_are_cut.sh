#!/usr/bin/env bash
# transformers 5.17.0: Qwen2.5-VL's get_rope_index cuts the seconds between frames to a whole number before it multiplies.
#
# The model's time positions are seconds times tokens_per_second, which is what makes a video of two frames a second differ from a
# film strip; the argument second_per_grid_ts takes floats, and the processor gives 0.5 or 1.5. One expects 0.5 s x 4 = 2 positions
# between frames. 5.16 and 5.17 compute 4 x int(0.5) = 0: all frames of the video lie at one time, and of 1.5 s at 4 in place of 6.
# 5.18 multiplies first. Nothing is printed, and log-probs of such rows differ between the two releases.
#
# Ends with 0 while 5.17.0 and 5.18.0 behave so, with 1 once one of them does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat >"$folder/times.py" <<'PY'
from sys import argv

import torch
import transformers
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

config = Qwen2_5_VLConfig(
    text_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "num_key_value_heads": 2, "vocab_size": 64},
    vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
                   "tokens_per_second": 4},
    video_token_id=9, image_token_id=8, vision_start_token_id=7, vision_end_token_id=6,
)
with torch.device("meta"):
    model = Qwen2_5_VLModel(config)
ids = torch.tensor([[1, 7, 9, 9, 9, 6]])  # three frames of one token each


def times(seconds):
    positions, _ = model.get_rope_index(
        ids, mm_token_type_ids=torch.tensor([[0, 0, 2, 2, 2, 0]]), video_grid_thw=torch.tensor([[3, 2, 2]]),
        second_per_grid_ts=torch.tensor([seconds]), attention_mask=torch.ones_like(ids),
    )
    time = positions[0, 0, 2:5]
    return (time - time[0]).tolist()


found = {seconds: times(seconds) for seconds in (0.5, 1.5, 2.0)}
print("transformers", transformers.__version__, "times of three frames by seconds between them:", found)
expected = {"5.17.0": {0.5: [0, 0, 0], 1.5: [0, 4, 8], 2.0: [0, 8, 16]}, "5.18.0": {0.5: [0, 2, 4], 1.5: [0, 6, 12], 2.0: [0, 8, 16]}}
raise SystemExit(found != expected[argv[1]])
PY
for version in 5.17.0 5.18.0; do
    "$folder/env/bin/pip" install --quiet "torch==2.13.0" "transformers==$version" pillow
    HF_HUB_OFFLINE=1 "$folder/env/bin/python" "$folder/times.py" "$version"
done
# Seen on 2026-11-28, Python 3.11, x86-64:
# transformers 5.17.0 times of three frames by seconds between them: {0.5: [0, 0, 0], 1.5: [0, 4, 8], 2.0: [0, 8, 16]}
# transformers 5.18.0 times of three frames by seconds between them: {0.5: [0, 2, 4], 1.5: [0, 6, 12], 2.0: [0, 8, 16]}
