"""What `dataproto plan` forecasts of a run on this CPU, beside what the run takes: CPU seconds and process memory.

    OMP_NUM_THREADS=1 python benchmarks/cpu_plan.py grpo                     # the default run of `dataproto grpo`
    OMP_NUM_THREADS=1 python benchmarks/cpu_plan.py ppo
    OMP_NUM_THREADS=1 python benchmarks/cpu_plan.py grpo --preset tiny --model-path DIRECTORY --max-response-length 64 \\
        --mean-response 64

Takes a recipe, `grpo` or `ppo`, and the options of `dataproto plan`. The run is a process of its own, with an evaluation before
the first of its steps and after the last one; its seconds are medians of all steps but the first. CPU seconds, in forecast and
fact, depend less than others on what else the machine does, if there is one thread.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place or ".").resolve() != ROOT / "benchmarks")]

from recipes.configs import plan_config  # noqa: E402
from recipes.forecast import StepForecast  # noqa: E402
from recipes.options import divided, options_of  # noqa: E402
from recipes.plan import plan  # noqa: E402

RUN, STEPS, MIB = "run", 9, 2**20
OF_THE_RUN = f"--steps {STEPS} --eval-every 0 --save-every 0 --loggers jsonl"
RECIPES = ("grpo", "ppo")


def run_timed(name: str, options: Sequence[str]) -> None:
    """A run whose ``timing_s/*`` are CPU seconds; prints its medians and the peak of its memory as JSON in the last line."""
    from recipes import grpo, ppo
    from recipes.run import loop, phases, run

    recipe, step = {"grpo": (grpo, grpo.grpo_step), "ppo": (ppo, ppo.ppo_step)}[name]

    @contextmanager
    def timed(metrics: MutableMapping[str, float], stage: str) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            name = f"timing_s/{stage}"
            metrics[name] = metrics.get(name, 0.0) + time.process_time() - start

    for module in (recipe, loop, phases):
        module.timed = timed  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        config = recipe.parse([*options, *OF_THE_RUN.split(), "--output-dir", folder])  # type: ignore[attr-defined]
        run(config, step)
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [row for row in map(json.loads, lines) if row["step"] > 1]
    found = {name: median(row.get(name, 0.0) for row in rows) for name in rows[-1] if name.startswith("timing_s/")}
    found |= {name: median(row[name] for row in rows) for name in ("perf/total_num_tokens", "response_length/mean")}
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    print(json.dumps(found))


def planned(recipe: str, options: Sequence[str]) -> StepForecast:
    """The forecast in CPU seconds, which are measured now and not kept: those of runs are other seconds."""
    kept = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            return plan(plan_config.parse([recipe, "--device", "cpu", *options]), time.process_time)
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if kept is not None:
                os.environ["XDG_CACHE_HOME"] = kept


def main(recipe: str, options: Sequence[str]) -> None:
    _, of_recipe = divided(options, options_of(plan_config.PlanOptions()))
    found = planned(recipe, options)
    done = subprocess.run(
        [sys.executable, __file__, RUN, recipe, *of_recipe], capture_output=True, text=True, check=True
    )
    fact = json.loads(done.stdout.splitlines()[-1])
    lines = [(f"{phase.name}, CPU s", phase.seconds, fact.get(f"timing_s/{phase.name}", 0.0)) for phase in found.phases]
    lines += [("step, CPU s", found.seconds, fact["timing_s/step"])]
    lines += [("process, MiB", found.memory / MIB, fact["peak"])]
    lines += [("tokens of a step", found.tokens, fact["perf/total_num_tokens"])]
    print("| | forecast | fact | ratio |\n| --- | --- | --- | --- |")
    for name, expected, value in lines:
        print(f"| {name} | {expected:.4g} | {value:.4g} | {expected / value:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == [RUN]:
        run_timed(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:2] and sys.argv[1] in RECIPES:
        main(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(f"name a recipe first: {' or '.join(RECIPES)}")
