"""Supervised training, then GRPO, on real questions about pictures: ``dataproto easy-vqa``.

With no arguments it reads the pictures and questions of the package ``easy-vqa`` (extra ``easy-vqa``), makes a small Qwen2.5-VL,
shows it some answers, and lets GRPO continue from there, on the CPU within minutes. The model writes its answer in words, and the
reward compares the text. With a checkpoint the same two phases train any checkpoint of a known family.

The run's directory is that of GRPO; its folder ``sft`` is that of the supervised phase. Each evaluation also measures two
controls: the same questions with other rows' pictures, and without pictures.
"""

from dataclasses import fields, replace
from pathlib import Path

from recipes.configs.easy_vqa_config import EasyVQAConfig, parse
from recipes.configs.shared.policy_gradient_config import PolicyGradientConfig
from recipes.configs.shared.run_config import RecipeConfig
from recipes.configs.shared.supervised_config import SupervisedConfig
from recipes.data.easy_vqa_rows import EasyVQA, answered, conversations, open_easy_vqa
from recipes.data.loader import EvaluationLoader, PromptLoader
from recipes.data.mixture import Mixture
from recipes.data.splits import tell_data
from recipes.demo.tiny_model import TinyConfig
from recipes.grpo import step_for
from recipes.options import training_command
from recipes.rewards import RewardFunction, load_reward, short_answer_reward
from recipes.rewards.reward_check import check_reward
from recipes.run.policy_gradient import PolicyTask, prompt_builder, prompt_loader, run
from recipes.run.run_directory import open_run_directory
from recipes.run.supervised import SupervisedTask, held_out_loss, run_supervised, tiny_model
from recipes.run.synthetic_environment import controlled_evaluation
from recipes.watch.console import start_phase
from rollout.prompts import SupervisedBuilder
from workers import Roles
from workers.training.checkpoint import latest_checkpoint

# With larger initial weights than Hugging Face's, and pictures of 64 pixels at 112, the model tells shapes apart sooner.
TINY_MODEL = TinyConfig(text_std=0.088, vision_std=0.2, min_pixels=112 * 112)
SFT, MODEL = "sft", "model"  # folders of the run's directory


def easy_vqa_task(config: EasyVQAConfig) -> PolicyTask:
    """GRPO on the questions, from the checkpoint of the supervised phase, which runs first unless it is complete.

    Raises:
        InvalidConfig, CheckpointError: the run directory or the data do not fit the options.
    """
    if config.model_path is not None:
        config.check_models(config.model_path)  # before anything is written
    with start_phase("reading data"):
        rows = open_easy_vqa(config.data.data_path)
    reward: RewardFunction = short_answer_reward
    if config.reward is not None:
        reward = load_reward(config.reward, config.on == "local", config.reward_weights)
    config = open_run_directory(config, config.updates)
    return policy_task(config, rows, str(supervised_checkpoint(config, rows)), reward)


def supervised_checkpoint(config: EasyVQAConfig, rows: EasyVQA) -> Path:
    """The model after the supervised phase, which runs if it has not been completed in this directory."""
    if not config.sft.steps:
        return Path(str(config.model_path))
    directory = config.run.output_dir
    found = latest_checkpoint(directory.absolute() / SFT)
    if found is None or found[0] < config.sft.steps:
        print(f"supervised phase: {config.sft.steps} steps of {config.sft.batch_size} answered questions")
        resume = config.run.resume and (directory / SFT).exists()
        model_path = config.model_path or str(
            tiny_model(directory / MODEL, config.run.seed, resume, TINY_MODEL, rows.texts())
        )
        shared = {each.name: getattr(config, each.name) for each in fields(RecipeConfig)}
        run = replace(config.run, steps=config.sft.steps, epochs=None, resume=resume, overwrite=False)
        run = replace(run, eval_every=0, eval_first=False, keep_best=None, output_dir=directory / SFT)
        shared |= {"run": run, "optimizer": config.sft.optimizer, "layout": replace(config.layout, rollout=0)}
        phase = SupervisedConfig(**shared | {"model_path": model_path})
        run_supervised(phase, lambda _, path: supervised_task(config, rows, path))
    return directory.absolute() / SFT / f"global_step_{config.sft.steps}" / "actor" / "huggingface"


def supervised_task(config: EasyVQAConfig, rows: EasyVQA, model_path: str) -> SupervisedTask:
    """Training questions with their answers, two in a conversation; after the last step the loss of held-out ones.

    Two of three conversations are open, about a colour and a shape: they teach the model to see sooner than those with yes or no,
    of which the data have most.
    """
    data = config.data
    longest = 2 * (data.max_prompt_length + data.max_response_length)
    builder = SupervisedBuilder.from_pretrained(
        model_path, longest, data.min_pixels, data.max_pixels, template_arguments=data.template_arguments
    )
    asked = Mixture([conversations(rows.train.open_questions(each)) for each in (True, False)], weights=[2, 1])
    loader = PromptLoader(asked, builder, config.sft.batch_size, config.run.seed, num_workers=data.num_workers)
    held_out = answered(rows.test.in_random_order()[: data.eval_rows])
    tell_data(loader, held_out)

    def evaluate(roles: Roles, step: int) -> dict[str, float]:
        return held_out_loss(roles, EvaluationLoader(held_out, builder, config.sft.batch_size))

    return SupervisedTask(builder, loader, evaluate, longest)


def policy_task(config: PolicyGradientConfig, rows: EasyVQA, model_path: str, reward: RewardFunction) -> PolicyTask:
    """All training questions, and the evaluation with its controls, in the run's directory, which is open."""
    data = config.data
    builder = prompt_builder(data, model_path)
    check_reward(reward, rows.train, builder, here=config.on == "local")
    test = rows.test.in_random_order()
    few = test[: data.eval_rows]
    controls = [test.with_other_pictures()[: data.eval_rows], few.without_pictures()]
    # After the last step these are all test questions, before it ``data.eval_rows`` of them, always the same.
    evaluate = controlled_evaluation(config, lambda step: test if step == config.run.steps else few, controls, builder)
    loader = prompt_loader(config, builder, rows.train)
    tell_data(loader, test)
    return PolicyTask(config, model_path, builder, loader, reward, evaluate)


main = training_command(parse, run, step_for, lambda _: easy_vqa_task)
