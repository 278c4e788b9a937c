#!/usr/bin/env bash
# transformers 5.24.0: what Qwen3-Omni hears in a sound of less than a second depends on the sounds next to it in the batch.
#
# Each sound is a segment of attention of its own, and a sound of whole seconds gives the same features in every company. One
# expects this of all sounds. But the tower fills up the last piece of each sound to the longest piece of the batch, and its
# three convolutions have biases: where a longer sound makes room after the end of a short one, the room is no longer zero after
# the first of them, and the next ones read it. By itself the short sound ends where the padding of the convolution begins. So
# log-probs that are computed in another batch than the one that sampled belong to another policy.
#
# Ends with 0 while transformers behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "transformers==5.24.0" "numpy==2.4.6"
cat >"$folder/sounds.py" <<'PY'
import torch
import transformers
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

torch.manual_seed(0)
config = Qwen3OmniMoeAudioEncoderConfig(
    d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64, output_dim=32, downsample_hidden_size=8
)
config._attn_implementation = "sdpa"
tower = Qwen3OmniMoeAudioEncoder(config).eval()
for weight in tower.parameters():
    torch.nn.init.normal_(weight, std=0.2)
short, whole = torch.randn(config.num_mel_bins, 60), torch.randn(config.num_mel_bins, 100)


def features(*sounds):
    with torch.no_grad():
        return tower(torch.cat(sounds, 1), feature_lens=torch.tensor([each.shape[1] for each in sounds])).last_hidden_state


alone, accompanied = features(short), features(short, whole)
of_short = (alone - accompanied[: len(alone)]).abs().amax(1)
of_whole = float((features(whole) - features(whole, whole.flip(1))[: len(features(whole))]).abs().max())
print("0.6 seconds, by themselves and next to a second; difference of each feature:", [round(x, 4) for x in of_short.tolist()])
print("a second, by itself and next to another one: at most", round(of_whole, 4))
print("transformers", transformers.__version__)
raise SystemExit(not (of_short[-1] > 0.01 and of_whole < 1e-4))
PY
"$folder/env/bin/python" "$folder/sounds.py"
# Seen on 2026-11-28, Python 3.11, x86-64:
# 0.6 seconds, by themselves and next to a second; difference of each feature:
# [0.001, 0.0008, 0.001, 0.0007, 0.0009, 0.0013, 0.0011, 0.0834]
# a second, by itself and next to another one: at most 0.0
