"""How far an engine's log-probs are from the actor's: ``dataproto parity``.

The engine takes the weights of the actor and answers prompts with and without images; the actor scores them. With no arguments:
vLLM and the small model in float32. Ends with status 1 where a difference exceeds ``--tolerance``.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.logging import disable_progress_bar

from recipes.algorithms.mismatch import Differences, differences
from recipes.configs.parity_config import ParityConfig, parse
from recipes.data.problem_rows import load_rows
from recipes.demo.rows import ProblemRows
from recipes.demo.tiny_model import tiny_checkpoint
from recipes.options import exit_status
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder
from workers import Roles, launch
from workers.cluster.launcher import check_extras
from workers.roles.actor import ActorConfig
from workers.roles.rollout_worker import RolloutConfig

MARKER = "<image>"


def compare_log_probs(config: ParityConfig) -> dict[str, Differences]:
    """The differences over all rows, over rows with images and over rows without."""
    check_extras(config.engine)  # before anything is loaded
    path = str(tiny_checkpoint(config.seed)) if config.model_path is None else config.model_path
    builder = PromptBuilder.from_pretrained(path, config.max_prompt_length)
    prompts = builder([_with_uid(row, number) for number, row in enumerate(prompt_rows(config))])
    sampling = SamplingParams(config.n, config.temperature, max_tokens=config.max_response_length, seed=config.seed)
    with launch_pair(config, path, builder) as roles:
        data = roles.rollout.generate(prompts, sampling)
        data |= roles.actor.log_probs(data, into="old_log_probs")
    return differences(data, data["old_log_probs"])


def launch_pair(config: ParityConfig, path: str, builder: PromptBuilder) -> Roles:
    """Launches the actor and the engine with the same weights and dtype."""
    actor = ActorConfig(path, temperature=config.temperature, dtype=config.dtype)
    options: dict[str, Any] = {"dtype": config.dtype}
    if config.engine == "vllm":
        options["max_model_len"] = config.max_prompt_length + config.max_response_length
        options["image_options"] = builder.image_options
    return launch(actor=actor, rollout=RolloutConfig(path, config.engine, options | dict(config.engine_options)))


def prompt_rows(config: ParityConfig) -> list[Mapping[str, Any]]:
    """The first rows of the data; or drawn problems, every second one without its picture."""
    if config.data_path is not None:
        rows = load_rows(config.data_path, "train")
        return [rows[number] for number in range(min(config.rows, len(rows)))]
    problems = ProblemRows(1, config.seed, "test", "")
    return [_without_images(problems[number]) if number % 2 else problems[number] for number in range(config.rows)]


def comparison_table(found: Mapping[str, Differences]) -> list[str]:
    """The differences as lines of a table, and a last line ``max ...`` for scripts."""
    lines = [f"{'rows':8}{'tokens':>8}{'mean':>11}{'99 %':>11}{'max':>11}{'ratio':>11}{'off by 1 %':>12}"]
    for kind, one in found.items():
        values = f"{one.mean:11.2e}{one.p99:11.2e}{one.max:11.2e}{one.ratio_mean:11.6f}{one.ratio_off:12.2%}"
        lines.append(f"{kind:8}{one.tokens:8}{values}")
    return [*lines, f"max {found['all'].max:.3e}"]


def _with_uid(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {**row, "uid": f"parity-{number}"}


def _without_images(row: Mapping[str, Any]) -> dict[str, Any]:
    messages = [{**message, "content": message["content"].replace(MARKER, "")} for message in row["prompt"]]
    return {**row, "prompt": messages, "images": []}


def main(arguments: Sequence[str] | None = None, config: ParityConfig | None = None) -> int:
    """Parses the command line, compares, prints, and returns the exit status."""
    with exit_status(arguments, resumes=False) as status:
        config = config or parse(status.arguments)
        disable_progress_bar()
        found = compare_log_probs(config)
    if status.code:
        return status.code
    print("\n".join(comparison_table(found)))
    too_far = config.tolerance is not None and not found["all"].max <= config.tolerance  # NaN is too far
    if too_far:
        print(f"the largest difference exceeds --tolerance {config.tolerance:g}")
    return int(too_far)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
