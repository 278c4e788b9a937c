"""Options that would do nothing beside the others of a command line, and what gives them an effect."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataproto.errors import InvalidConfig
from recipes.options.option_table import as_given, options_of


@dataclass(frozen=True)
class IdleRule:
    """Options, when they do nothing, and the way out. A name that ends in a dot stands for all options of the group."""

    names: tuple[str, ...]
    is_idle: Callable[[Any], bool]
    way_out: str

    def covers(self, name: str) -> bool:
        return any(name == each or (each.endswith(".") and name.startswith(each)) for each in self.names)


def _value(config: Any, *path: str) -> Any:
    """A value of a configuration by the fields that lead to it; ``None`` in the configuration of a command without them."""
    for name in path:
        config = getattr(config, name, None)
    return config


IDLE_RULES = (
    IdleRule(("ray.", "max-restarts"), lambda c: c.on == "local", "this run starts no processes: add --on ray"),
    IdleRule(
        ("ray.object-store-gib",),
        lambda c: c.ray.address is not None,
        "a running cluster has its own: leave out --ray.address to start one here",
    ),
    IdleRule(
        ("ray.reward-processes", "ray.reward-timeout-s"),
        lambda c: hasattr(c, "episodes"),
        "environments give the rewards: leave it out",
    ),
    IdleRule(
        ("engine", "engine-options", "ray.rollout-processes", "ray.reward-processes", "ray.reward-timeout-s"),
        lambda c: _value(c, "data", "max_response_length") == 0,
        "no question is asked: leave out --max-response-length 0",
    ),
    IdleRule(
        ("eval-every", "eval-rows", "eval-first", "max-response-length", "engine", "engine-options"),
        lambda c: _value(c, "data", "streaming") and not c.data.eval_data_path,
        "no rows of a stream are held out: add --eval-data-path",
    ),
    IdleRule(("lora-alpha",), lambda c: not c.compute.lora_rank, "there are no adapters: add --lora-rank"),
    IdleRule(
        ("pipeline-schedule", "pipeline-chunks", "pipeline-layers"),
        lambda c: c.layout.pp == 1,
        "there is one stage: add --layout.pp",
    ),
    IdleRule(
        ("pipeline-chunks",),
        lambda c: c.compute.pipeline_schedule != "interleaved",
        "only one schedule has chunks: add --pipeline-schedule interleaved",
    ),
    IdleRule(
        ("unsharded", "offload"),
        lambda c: c.layout.dp * c.layout.sp == 1,
        "weights are not sharded: add --layout.dp or --layout.sp",
    ),
    IdleRule(
        ("optimizer.min-lr-ratio", "optimizer.total-steps"),
        lambda c: c.optimizer.schedule == "constant",
        "the rate is constant: add --optimizer.schedule linear or cosine",
    ),
    IdleRule(
        (
            *("critic-optimizer.", "algorithm.lam", "algorithm.whiten", "algorithm.critic-epochs"),
            *("algorithm.critic-warmup", "algorithm.value-clip"),
        ),
        lambda c: c.critic is None,
        "there is no critic: add --algorithm.advantage gae, or over turns turn_gae or bi_level_gae",
    ),
    IdleRule(
        ("critic-optimizer.min-lr-ratio", "critic-optimizer.total-steps"),
        lambda c: c.critic_optimizer.schedule == "constant",
        "the critic's rate is constant: add --critic-optimizer.schedule linear or cosine",
    ),
    IdleRule(
        ("level", "drawn-rows"),
        lambda c: bool(c.data.data_path),
        "only drawn data have it: leave out --data-path",
    ),
    IdleRule(
        ("level",),
        lambda c: hasattr(c, "episodes"),
        "environments draw no problems of a level: leave it out",
    ),
    IdleRule(
        ("rollout.early-rewards",),
        lambda c: hasattr(c, "episodes"),
        "environments give the rewards: leave it out",
    ),
    IdleRule(
        ("instruction",),
        lambda c: hasattr(c, "episodes") and not c.data.data_path,
        "only rows of your own have it: add --data-path",
    ),
    IdleRule(
        ("instruction",),
        lambda c: c.data.keys.messages_key is not None,
        "messages stay as they are: leave it out, or name a column of text by --prompt-key",
    ),
    IdleRule(
        ("level", "instruction", "on-bad-row", "media-root"),
        lambda c: hasattr(c, "sft"),
        "the questions of easy-VQA have none, and all can be used: leave it out",
    ),
    IdleRule(
        ("sft.batch-size", "sft.optimizer."),
        lambda c: not c.sft.steps,
        "there is no supervised phase: leave out --sft.steps 0",
    ),
    IdleRule(
        ("sft.optimizer.min-lr-ratio", "sft.optimizer.total-steps"),
        lambda c: c.sft.optimizer.schedule == "constant",
        "the rate is constant: add --sft.optimizer.schedule linear or cosine",
    ),
    IdleRule(
        ("warm-up.",),
        lambda c: c.model_path is not None,
        "only the small model has this phase: leave out --model-path",
    ),
    IdleRule(
        ("image-column", "label-column", "exclude"),
        lambda c: not c.data.data_path,
        "drawn pictures have no files and columns: add --data-path",
    ),
    IdleRule(("on-bad-row",), lambda c: not c.data.data_path, "all drawn rows can be used: add --data-path"),
    IdleRule(
        ("rollout.replay-routing",),
        lambda c: c.model_path is None,
        "the small model has no experts: leave it out",
    ),
    IdleRule(("shuffle-buffer",), lambda c: not c.data.streaming, "only streams have a buffer: add --streaming"),
    IdleRule(("weights",), lambda c: len(c.data.data_path) == 1, "one data set has the whole weight: name several"),
    IdleRule(
        ("algorithm.kl", "algorithm.kl-in"),
        lambda c: not c.algorithm.kl_coef,
        "there is no KL term: add --algorithm.kl-coef",
    ),
    IdleRule(
        ("algorithm.kl-horizon",),
        lambda c: c.algorithm.kl_target is None,
        "the KL weight is constant: add --algorithm.kl-target",
    ),
    IdleRule(
        ("algorithm.entropy-anneal",),
        lambda c: not c.algorithm.entropy_coef,
        "there is no entropy bonus: add --algorithm.entropy-coef",
    ),
    IdleRule(
        ("algorithm.overlong-penalty",),
        lambda c: not c.algorithm.overlong_buffer,
        "no response is penalised for its length: add --algorithm.overlong-buffer",
    ),
    IdleRule(
        ("algorithm.overlong-buffer", "algorithm.overlong-penalty"),
        lambda c: c.algorithm.advantage == "reverse_kl",
        "distillation learns from the teacher, not from rewards: leave it out",
    ),
    IdleRule(
        ("algorithm.correction-limit",),
        lambda c: c.algorithm.correction == "none",
        "nothing is corrected: add --algorithm.correction",
    ),
    IdleRule(
        ("algorithm.rejection-bounds",),
        lambda c: c.algorithm.rejection == "none",
        "nothing is rejected: add --algorithm.rejection",
    ),
    IdleRule(
        ("scoring-token-budget",),
        lambda c: (
            _value(c, "algorithm", "skip_old_log_probs")
            and c.critic is None
            and not c.algorithm.kl_coef
            and c.algorithm.advantage != "reverse_kl"
        ),
        "no pass of this run is without gradients: leave it out",
    ),
    IdleRule(
        ("algorithm.skip-old-log-probs",),
        lambda c: c.rollout.carries,
        "samples that go on have the engine's log-probs anyway: leave it out",
    ),
    IdleRule(("lr", "batch-size"), lambda c: _value(c, "steps") == 0, "nothing is learnt: leave out --steps 0"),
    IdleRule(
        ("vllm-memory-share", "vllm-adapters"),
        lambda c: c.engine.sampler != "vllm",
        "another engine samples: add --sampler vllm",
    ),
    IdleRule(("devices",), lambda c: not getattr(c, "fit", True), "the layout says how many there are: add --fit"),
)


def refuse_idle_options(config: Any, default: Any) -> None:
    """Raises `InvalidConfig` for an option that differs from ``default`` and does nothing in ``config``; names the way out."""
    before = {option.name: option.default for option in options_of(as_given(default))}
    for option in options_of(as_given(config)):
        if option.default != before.get(option.name):
            for rule in IDLE_RULES:
                if rule.covers(option.name) and rule.is_idle(config):
                    raise InvalidConfig(f"--{option.name} would do nothing: {rule.way_out}")
