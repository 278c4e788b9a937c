"""Names that are no options here: those of verl, EasyR1 and TRL (docs/moving.md), and those of earlier versions."""

PREFIXES = ("actor_rollout_ref.", "worker.")
"""What verl's and EasyR1's names begin with, and docs/moving.md leaves out."""

PEER_NAMES = {
    "--preset any --model-path": "model model_name_or_path model.path actor.model.model_path",
    "--data-path": "train_files train_dataset dataset_name dataset data.train_files",
    "--eval-data-path": "val_files eval_dataset data.val_files",
    "--media-root": "image_dir image_folder image_folders media_dir data.image_dir",
    "--batch-size": "train_batch_size rollout_batch_size generation_batch_size data.train_batch_size data.rollout_batch_size",
    "--algorithm.minibatch": "ppo_mini_batch_size actor.ppo_mini_batch_size actor.global_batch_size",
    "--token-budget": "per_device_train_batch_size gradient_accumulation_steps actor.ppo_micro_batch_size_per_gpu "
    "actor.ppo_max_token_len_per_gpu actor.micro_batch_size_per_device_for_update",
    "--algorithm.epochs": "ppo_epochs num_iterations actor.ppo_epochs",
    "--max-prompt-length": "data.max_prompt_length",
    "--max-response-length": "max_completion_length max_new_tokens data.max_response_length",
    "--instruction": "format_prompt data.format_prompt",
    "--template-arguments NAME VALUE": "chat_template_kwargs data.apply_chat_template_kwargs",
    "--algorithm.n": "num_generations rollout.n",
    "--algorithm.temperature": "rollout.temperature",
    "--algorithm.top-p": "rollout.top_p",
    "--algorithm.top-k": "rollout.top_k",
    "--algorithm.advantage": "adv_estimator scale_rewards algorithm.adv_estimator",
    "--algorithm.loss": "loss_type actor.policy_loss.loss_mode actor.loss_type",
    "--algorithm.aggregation": "loss_agg_mode actor.loss_agg_mode actor.loss_avg_mode",
    "--algorithm.clip LOW HIGH": "epsilon epsilon_high actor.clip_ratio_low actor.clip_ratio_high",
    "--algorithm.kl-coef": "beta actor.kl_loss_coef actor.use_kl_loss algorithm.use_kl_loss algorithm.kl_coef "
    "algorithm.kl_ctrl.kl_coef",
    "--algorithm.kl-in reward": "algorithm.use_kl_in_reward",
    "--algorithm.kl": "kl_loss_type actor.kl_loss_type algorithm.kl_penalty",
    "--algorithm.dual-clip": "clip_ratio_c delta actor.clip_ratio_c actor.clip_ratio_dual",
    "--algorithm.entropy-coef": "entropy_coef actor.entropy_coeff",
    "--algorithm.dynamic-sampling GENERATIONS": "algorithm.filter_groups.enable algorithm.online_filtering",
    "--algorithm.kl k3+": "use_bias_correction_kl",
    "--algorithm.correction": "vllm_importance_sampling_mode rollout_is algorithm.rollout_correction.rollout_is "
    "algorithm.rollout_correction.",
    "--algorithm.correction-limit": "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min rollout_is_threshold "
    "vllm_importance_sampling_cap algorithm.rollout_correction.rollout_is_threshold",
    "--algorithm.rejection": "rollout_rs algorithm.rollout_correction.rollout_rs",
    "--algorithm.rejection-bounds 1/HIGH 1/LOW": "rollout_rs_threshold algorithm.rollout_correction.rollout_rs_threshold "
    "algorithm.rollout_correction.rollout_rs_threshold_lower",
    "--algorithm.skip-old-log-probs true|false": "algorithm.rollout_correction.bypass_mode",
    "--optimizer.lr": "learning_rate actor.optim.lr",
    "--optimizer.schedule": "lr_scheduler_type actor.optim.lr_scheduler_type",
    "--optimizer.warmup-steps": "lr_warmup_steps warmup_steps actor.optim.lr_warmup_steps",
    "--optimizer.max-grad-norm": "max_grad_norm actor.optim.clip_grad actor.max_grad_norm",
    "--activation-checkpointing none|full": "gradient_checkpointing enable_gradient_checkpointing "
    "model.enable_gradient_checkpointing actor.model.enable_gradient_checkpointing",
    "--dtype float32|bfloat16": "fp16 bf16 torch_dtype precision",
    "--compile true|false": "torch_compile actor.use_torch_compile",
    "--freeze-vision true|false": "freeze_vision_tower actor.freeze_vision_tower actor.model.freeze_vision_tower",
    "--lora-rank": "peft_config lora_r model.lora_rank actor.model.lora.rank",
    "--lora-alpha": "model.lora_alpha actor.model.lora.alpha",
    "--offload true|false": "actor.fsdp_config.param_offload actor.offload.offload_params",
    "--engine hf|vllm": "use_vllm vllm_mode rollout.name",
    "--engine-options memory_share SHARE": "gpu_memory_utilization vllm_gpu_memory_utilization rollout.gpu_memory_utilization",
    "--engine-options tensor_parallel N": "vllm_tensor_parallel_size rollout.tensor_model_parallel_size "
    "rollout.tensor_parallel_size",
    "--on ray --layout.dp N": "n_gpus_per_node nnodes num_gpus gpus device devices trainer.n_gpus_per_node trainer.nnodes",
    "--layout.sp": "ulysses_size actor.ulysses_sequence_parallel_size actor.ulysses_size",
    "--epochs": "num_epochs num_train_epochs trainer.total_epochs",
    "--steps": "max_steps trainer.total_training_steps trainer.max_steps",
    "--eval-every": "test_freq val_freq eval_steps trainer.test_freq trainer.val_freq",
    "--eval-first true|false": "val_before_train eval_on_start trainer.val_before_train",
    "--eval-samples": "num_generations_eval rollout.val_kwargs.n rollout.val_override_config.n",
    "--save-every": "save_freq save_steps trainer.save_freq",
    "--keep-checkpoints": "save_total_limit save_limit trainer.save_limit trainer.max_actor_ckpt_to_keep",
    "--resume": "resume_from_checkpoint resume_mode trainer.resume_mode trainer.find_last_checkpoint",
    "--output-dir": "default_local_dir save_checkpoint_path trainer.default_local_dir trainer.save_checkpoint_path",
    "--loggers": "report_to trainer.logger logger",
    "--reward FILE.py:FUNCTION": "reward_funcs reward_function compute_score reward.custom_reward_function.path "
    "reward.reward_function",
}
"""Options of this library, and their names in other frameworks, where a name with a dot at its end stands for all of its group.
Where another framework takes true or false, the entry names the values that the option takes here.
"""

_ours = {name: ours for ours, names in PEER_NAMES.items() for name in names.split()}


def own_name(argument: str) -> str | None:
    """What a peer's option is called here; ``None`` if it is none.

    >>> own_name("--learning-rate=1e-6"), own_name("actor_rollout_ref.rollout.n=8"), own_name("--steps")
    ('--optimizer.lr', '--algorithm.n', None)
    """
    name = argument.partition("=")[0].lstrip("-+").replace("-", "_").lower()
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return _ours.get(name) or _ours.get(f"{name.rpartition('.')[0]}.")


OTHER_NAMES = {"image-column": "image-key", "label-column": "answer-key"}
"""Options, and the names that columns of the same kind have in other commands, which a command line may give too."""

FILE_ONLY = {
    *("ray.cpus", "ray.gpus", "ray.object-store-gib", "ray.pip", "ray.working-dir", "ray.show-logs", "ray.env-vars"),
    *("ray.timeout-s", "ray.reward-timeout-s", "ray.reward-processes"),
    *("pipeline-schedule", "pipeline-chunks", "pipeline-layers", "flash-attention", "float8", "scoring-token-budget"),
    *("freeze-language", "lora-vision", "num-workers", "keep-best", "save-behind", "video-key"),
    *(
        "algorithm.entropy-anneal",
        "algorithm.filter-metric",
        "algorithm.kl-target",
        "rollout.min-p",
        "rollout.early-rewards",
    ),
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
ENDED = {
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
