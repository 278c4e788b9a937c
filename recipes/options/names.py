"""Names that are no options here: those of verl, EasyR1 and TRL (docs/moving.md), and those of earlier versions."""

from functools import cache
from pathlib import Path

import yaml

PREFIXES = ("actor_rollout_ref.", "worker.")
"""What verl's and EasyR1's names begin with, and docs/moving.md leaves out."""


@cache
def peer_names() -> dict[str, str]:
    """Names of options in other frameworks, each with that of the option here."""
    table = yaml.safe_load(Path(__file__).with_name("peer_names.yaml").read_text(encoding="utf-8"))
    return {name: ours for ours, names in table.items() for name in names.split()}


def own_name(argument: str) -> str | None:
    """What a peer's option is called here; ``None`` if it is none.

    >>> own_name("--learning-rate=1e-6"), own_name("actor_rollout_ref.rollout.n=8"), own_name("--steps")
    ('--optimizer.lr', '--algorithm.n', None)
    """
    name = argument.partition("=")[0].lstrip("-+").replace("-", "_").lower()
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return peer_names().get(name) or peer_names().get(f"{name.rpartition('.')[0]}.")


OTHER_NAMES = {"image-column": "image-key", "label-column": "answer-key"}
"""Options, and the names that columns of the same kind have in other commands, which a command line may give too."""

FILE_ONLY = {
    *("ray.cpus", "ray.gpus", "ray.object-store-gib", "ray.pip", "ray.working-dir", "ray.show-logs", "ray.env-vars"),
    *("ray.timeout-s", "ray.reward-timeout-s", "ray.reward-processes"),
    *("pipeline-schedule", "pipeline-chunks", "pipeline-layers", "flash-attention", "float8", "scoring-token-budget"),
    *("freeze-language", "lora-vision", "num-workers", "keep-best", "save-behind", "video-key"),
    *("algorithm.entropy-anneal", "algorithm.filter-metric", "algorithm.kl-target", "rollout.min-p"),
    *("optimizer.betas", "optimizer.min-lr-ratio", "optimizer.total-steps", "algorithm.gamma", "algorithm.dual-clip"),
    *("agents.turns", "agents.tokens", "agents.seconds", "agents.wall-clock", "agents.memory-gib", "agents.drop-cut"),
    "console-columns",
}
"""Options that a file sets (``--config FILE``) and no command line: those of a place, and those that few runs change."""

CHANGEABLE = {
    *("steps", "epochs", "eval-every", "eval-first", "eval-rows", "eval-samples", "eval-data-path"),
    *("save-every", "save-behind", "keep-checkpoints", "keep-best", "keep-rollouts", "loggers", "console-columns"),
    *("reward-weights", "algorithm.clip", "algorithm.dual-clip", "algorithm.value-clip"),
    *("algorithm.kl-coef", "algorithm.kl-in", "algorithm.kl", "algorithm.kl-target"),
    *(
        f"{optimizer}.{name}"
        for optimizer in ("optimizer", "critic-optimizer")
        for name in ("lr", "schedule", "warmup-steps", "total-steps", "min-lr-ratio", "max-grad-norm")
    ),
}
"""Options that ``--resume RUN --change NAME=VALUE ...`` may change."""

OF_THE_FUNCTION = "it is a constant of {0} now: copy that function with another one, --algorithm.{1} FILE.py:FUNCTION"
OF_A_COLUMN = (
    "it is a constant of recipes.algorithms.covariances now: register a loss with another one, LOSSES.register"
)
DECODED_AHEAD = "--rollout.staleness N takes its place: 0 is exactly on policy, with 1 a sample may be one update old"
ENDED = {
    "push-to-hub": "hf upload ORG/NAME OUTPUT --private --exclude config.yaml uploads what is exported",
    "shuffled-control": "run once more with --shuffled-rewards and another --output-dir",
    **{f"rollout.{name}": DECODED_AHEAD for name in ("over-ask", "ahead", "parts", "early-update", "max-staleness")},
    "ray.rollout-processes": "it is a part of the layout now, --layout.rollout N",
    "rollout.early-rewards": "groups are scored while engines of their own decode others with --rollout.staleness 0",
    "rollout.quantization": "give it to the engine, --engine-options quantization fp8",
    "rollout.speculate": "give it to the engine, --engine-options speculate N",
    "algorithm.sapo-temperatures": OF_THE_FUNCTION.format("recipes.algorithms.gated_policy_loss", "loss"),
    "algorithm.cov-ratio": OF_A_COLUMN,
    "algorithm.cov-bounds": OF_A_COLUMN,
    "algorithm.kl-cov-coef": OF_THE_FUNCTION.format("recipes.algorithms.kl_cov_loss", "loss"),
    "algorithm.step-weight": OF_THE_FUNCTION.format("recipes.algorithms.gigpo_advantage", "advantage"),
    "algorithm.turn-gamma": OF_THE_FUNCTION.format("recipes.algorithms.turn_advantages", "advantage"),
    "algorithm.kl-horizon": "the weight of the KL term is adapted over 10,000 rows",
    "algorithm.overlong-penalty": "the penalty is 1; subtract another one in your reward function, --reward FILE.py:FUNCTION",
}
"""Options of earlier versions, and what to do instead."""
