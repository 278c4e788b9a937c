"""The run around a step function: options, data, evaluation, checkpoints, resume, metrics and report.

`run` trains by a policy-gradient algorithm of your own with the options of `recipes.grpo`. `train` is the loop alone, for roles,
rows and rewards of your own; docs/custom_recipe.py is a whole recipe around it::

    def reinforce_step(roles, prompts):
        data = roles.rollout.generate(prompts, SamplingParams(n=8, max_tokens=64))
        data |= roles.reward.score(data)
        data["advantages"] = group_advantage(data["token_level_rewards"], data["uid"], data["response_mask"])
        metrics = roles.actor.update(data, reinforce_loss)
        roles.sync_weights()
        return data, metrics

    run = RunConfig(steps=100, resume=True, output_dir=Path("outputs/mine"))
    evaluate = greedy_evaluation(EvaluationLoader(held_out, builder, 64), 64, run.output_dir)
    with recorded_run(run), launch(actor=ActorConfig(checkpoint), reward=reward) as roles:
        train(run, roles, PromptLoader(rows, builder, 64), reinforce_step, evaluate, builder)

`recorded_run` prepares the run's directory and writes its report; `attempts` starts a run again after a worker has failed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
