#!/usr/bin/env bash
# The GPU figures of RESULTS.md, part by part. Each part has a limit of time, and one that fails or ends late leaves the others.
#
#   bash benchmarks/on_gpus.sh OUT PART ...      # logs into OUT; prints the last lines of each part
#
# | part | GPUs | what | seconds on a fresh machine |
# | presets | 2 | ten steps: 7B with adapters on one as on a card of 80 GB, 3B in 4 bits on the other as on one of 22 GiB | 560 |
# | preset-7b | 2 | ten steps of 7B, as on cards of 80 GB | 560 |
# | preset-3b | 1 | ten steps of 3B, as on a card of 80 GB | 480 |
# | step | 2 | 7B, 128 prompts x 5 samples, with FlashAttention 4 if it is installed | 400 |
# | staleness | 2 | the same step, decoded ahead by one update | 560 |
# | recurrent | 2 of 141 GB | Qwen3.5-9B, 32 prompts x 5 samples | 600 |
# | drafts | 1 | Qwen3.5-9B with three drafted tokens, and without | 500 |
# | agents | 1 | 3B: agents through their clients, and native episodes | 200 |
# | long-rows | 2 | 7B, rows of 32k tokens that both share | 200 |
# | larger | 4 | 7B, 512 prompts x 5 samples of log-normal length | 560 |
# | layouts | 4 | 7B: dp 2 x tp 2, tp 2 x pp 2, sp 2 x pp 2 | 500 |
# | experts | 4 | 16 layers of 30B-A3B: dp 4 x ep 4, dp 4 | 400 |
set -uo pipefail
out=$(realpath "${1:?a folder for the logs}")
shift
mkdir -p "$out"
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
checkpoints=/tmp/random-checkpoints

# limited SECONDS NAME COMMAND ...
limited() {
    local seconds=$1 name=$2 begun=$SECONDS
    shift 2
    timeout --kill-after 10 "$seconds" "$@" > "$out/$name.log" 2>&1
    echo "== $name: status $?, $((SECONDS - begun)) s"
    grep -v -i -E "warning|Failed to load|_pytree" "$out/$name.log" | tail -n 12 | cut -c1-400
}

checkpoint() { [ -d "$checkpoints/$1" ] || python benchmarks/random_checkpoint.py "$1" "$checkpoints/$1"; }
engine_only() { python benchmarks/random_checkpoint.py "$1" "$2" --without-weights; } # 9B of weights take 60 to 100 s to write

# preset NAME GIB GPU[,GPU] OPTION ...: ten steps on cards of so many GiB: other processes hold the rest of these, and torch and
# vLLM are told that there is no more, in the processes of Ray too.
preset() {
    local name=$1 card=$2 gpus=$3 gpu holders=()
    shift 3
    for gpu in ${gpus//,/ }; do
        CUDA_VISIBLE_DEVICES=$gpu python "$out/hold.py" "$card" &
        holders+=($!)
    done
    sleep 15
    CUDA_VISIBLE_DEVICES=$gpus CARD_GIB=$card PYTHONPATH=$out/card:$PYTHONPATH limited 560 "$name" python -m recipes grpo \
        --preset "$@" --steps 10 --save-every 0 --eval-every 0 --no-eval-first --max-response-length 512 --output-dir "$out/$name"
    kill "${holders[@]}"
}

mkdir -p "$out/card"
cat > "$out/hold.py" << 'PY'
import sys, time, torch

held = torch.cuda.mem_get_info()[1] - int(float(sys.argv[1]) * 2**30) - 600 * 2**20  # 600 MiB: this process itself
kept = torch.empty(max(held, 0), dtype=torch.uint8, device="cuda")
time.sleep(3600)
PY
cat > "$out/card/sitecustomize.py" << 'PY'
import importlib.util
import os
import sys


class Card:
    """The properties of a device of another size."""

    def __init__(self, properties, size):
        self._properties, self.total_memory = properties, size

    def __getattr__(self, name):
        return getattr(self._properties, name)


def resize(cuda):
    size = int(float(os.environ["CARD_GIB"]) * 2**30)
    free, properties = cuda.mem_get_info, cuda.get_device_properties
    cuda.mem_get_info = cuda.memory.mem_get_info = lambda *given, **named: (free(*given, **named)[0], size)
    cuda.get_device_properties = lambda *given, **named: Card(properties(*given, **named), size)


class OnImport:
    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), resize(module))
        return spec


sys.meta_path.insert(0, OnImport())
PY

step() { # NAME LIMIT OPTION ...
    local name=$1 seconds=$2
    shift 2
    limited "$seconds" "$name" python benchmarks/geo3k_step.py --compile --activation-checkpointing selective --steps 3 "$@"
}

presets() {
    checkpoint 3b && checkpoint 7b
    preset preset-7b-lora 79.1 0 7b --model-path "$checkpoints/7b" --lora-rank 32 --batch-size 32 &
    preset preset-3b-4bit 22 1 3b --model-path "$checkpoints/3b" --lora-rank 16 --load-in-4bit --batch-size 16 &
    wait
}

flash=$(python -c "import flash_attn.cute" 2> /dev/null && echo fa4 || echo torch)
two=(--gpus 2 --size 7b --prompts 128 --minibatch 32 --token-budget 9472 --scoring-token-budget 32768 --unsharded weights)

for part in "$@"; do
    case $part in
        presets) presets ;;
        preset-7b)
            checkpoint 7b
            preset preset-7b 79.1 0,1 7b --model-path "$checkpoints/7b" --batch-size 32
            ;;
        preset-3b)
            checkpoint 3b
            preset preset-3b 79.1 0 3b --model-path "$checkpoints/3b" --batch-size 64
            ;;
        step) step step 420 "${two[@]}" --flash-attention "$flash" --max-tokens 512 --whole-responses \
            --rollout '{"max_num_seqs": 320, "memory_share": 0.3}' ;;
        staleness) step staleness 580 "${two[@]}" --staleness 1 --apart 0 --rollout '{"max_num_seqs": 512}' ;;
        recurrent)
            step recurrent 600 --gpus 2 --size qwen3.5-9b --prompts 32 --minibatch 32 --max-tokens 512 --whole-responses \
                --token-budget 6144 --unsharded weights --rollout '{"load_format": "dummy"}'
            ;;
        drafts)
            engine_only qwen3.5-9b "$out/drafts/qwen3.5-9b"
            limited 600 drafts python benchmarks/draft_speed.py --size qwen3.5-9b --work "$out/drafts" --rows 16 64 160 --samples 5 \
                --response 256 --tokens 0 3 --options '{"load_format": "dummy"}'
            ;;
        agents)
            engine_only 3b "$out/3b"
            limited 300 agents python benchmarks/agents.py rate --engine vllm --model "$out/3b" --conversations 256 \
                --turn-tokens 64 --times 2 --options '{"max_num_seqs": 128, "load_format": "dummy"}'
            ;;
        larger)
            step larger 580 --gpus 4 --size 7b --token-budget 10240 --scoring-token-budget 32768 --unsharded auto \
                --rollout '{"max_model_len": 3072, "max_num_seqs": 640, "memory_share": 0.4}'
            ;;
        long-rows)
            limited 240 long-rows torchrun --nproc-per-node 2 benchmarks/train_step.py --size 7b --parts ours --layout sp=2 \
                --rows long --prompts 1 --checkpointing selective --token-budget 16384 --steps 3 --warmup 2
            ;;
        layouts)
            for layout in dp=2,tp=2 tp=2,pp=2 sp=2,pp=2; do
                limited 200 "layout-$layout" torchrun --nproc-per-node 4 benchmarks/train_step.py --size 7b --parts ours \
                    --layout "$layout" --checkpointing selective
            done
            ;;
        experts)
            for layout in dp=4,ep=4 dp=4; do
                limited 240 "experts-$layout" torchrun --nproc-per-node 4 benchmarks/train_step.py --size 30b-a3b --layers 16 \
                    --parts ours --layout "$layout" --checkpointing selective
            done
            ;;
        *) echo "no part $part: see the head of this file" >&2 ;;
    esac
done
