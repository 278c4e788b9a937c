"""What `dataproto plan --fit` chooses on this CPU, beside its neighbours: forecast and measured seconds and memory of a step.

    OMP_NUM_THREADS=1 python benchmarks/fit_choice.py                       # the default run of `dataproto grpo`
    OMP_NUM_THREADS=1 python benchmarks/fit_choice.py --preset any --model-path DIRECTORY --max-response-length 64 \\
        --mean-response 60

Takes the options of `dataproto plan grpo`. Each choice is a run in a process of its own, one after the other, ROUNDS times; its
step is the median of all but the first. CPU seconds, in forecast and fact, hardly depend on what else the machine does, if
there is one thread. Memory is that of the process, as the run itself compares it at its end.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place or ".").resolve() != ROOT / "benchmarks")]

from benchmarks.cpu_plan import planned  # noqa: E402
from recipes.configs import plan_config  # noqa: E402
from recipes.forecast import StepForecast, forecast  # noqa: E402
from recipes.options import divided, options_of  # noqa: E402
from recipes.plan import fit  # noqa: E402

STEPS, ROUNDS = 11, 2
OF_THE_RUN = f"--steps {STEPS} --eval-first false --eval-rows 1 --save-every 0 --keep-rollouts 0 --loggers jsonl"
RUN = "run"


def neighbours(chosen: StepForecast) -> list[StepForecast]:
    """The chosen setting, the same with other budgets, and with the other modes of checkpointing."""
    compute, longest = chosen.setting.compute, int(chosen.setting.batch.lengths.max())
    budgets = [max(compute.token_budget * double // 8, longest) for double in (8, 16, 4, 2, 1)]
    computes = [replace(compute, token_budget=budget) for budget in dict.fromkeys(budgets)]
    modes = [mode for mode in ("none", "selective", "full") if mode != compute.activation_checkpointing]
    computes += [replace(compute, activation_checkpointing=mode) for mode in modes]
    return [forecast(replace(chosen.setting, compute=each)) for each in computes]


def measured(found: StepForecast, options: Sequence[str]) -> dict[str, float]:
    """CPU and wall seconds of a step of a run with this choice, and forecast and fact of the process's memory in GiB."""
    compute = found.setting.compute
    choice = f"--token-budget {compute.token_budget} --activation-checkpointing {compute.activation_checkpointing}"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            RUN,
            *options,
            *OF_THE_RUN.split(),
            *choice.split(),
            "--output-dir",
            folder,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
        rows: list[dict[str, Any]] = [
            json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()
        ]
    memory = re.search(r"process memory, GiB +([\d.]+) +([\d.]+)", done.stdout)
    assert memory is not None, done.stdout
    steps = rows[1:]
    cpu, wall = (median(row[name] for row in steps) for name in ("timing_cpu_s/step", "timing_s/step"))
    return {"cpu": cpu, "wall": wall, "expected": float(memory[1]), "memory": float(memory[2])}


def run_timed(options: Sequence[str]) -> None:
    """A run of GRPO whose metrics have the CPU seconds of each step."""
    from recipes.grpo import grpo_step, parse
    from recipes.run import run

    def timed_step(*args: Any, **more: Any) -> Any:
        start = time.process_time()
        data, metrics = grpo_step(*args, **more)
        return data, metrics | {"timing_cpu_s/step": time.process_time() - start}

    run(parse(options), timed_step)


def main(options: Sequence[str]) -> None:
    _, of_recipe = divided(options, options_of(plan_config.PlanOptions()))
    chosen = fit(planned("grpo", options).setting)
    choices = neighbours(chosen)
    rounds = [[measured(each, of_recipe) for each in choices] for _ in range(ROUNDS)]
    print("| budget | checkpointing | micro-batches | forecast s | CPU s | wall s | forecast GiB | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for number, found in enumerate(choices):
        each = {name: min(one[number][name] for one in rounds) for name in rounds[0][number]}
        compute, parts = found.setting.compute, len(found.setting.micro_batches)
        cells = [f"{compute.token_budget}{'' if number else ', chosen'}", compute.activation_checkpointing, str(parts)]
        cells += [f"{value:.3f}" for value in (found.seconds, each["cpu"], each["wall"])]
        cells += [f"{value:.3f}" for value in (each["expected"], each["memory"])]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [RUN]:
        run_timed(sys.argv[2:])
    else:
        main(sys.argv[1:])
