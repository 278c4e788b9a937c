"""The public names of recipe packages: adding or losing one is a decision."""

from importlib import import_module

import pytest

EXPORTS = {
    "recipes.run": """PolicyGradientConfig RunConfig StepFunction StepState SupervisedConfig SupervisedTask attempts
        evaluate_answers evaluate_samples greedy_evaluation held_out_evaluation launch_supervised measure_rollouts
        next_token_loss recorded_run run run_supervised train""",
    "recipes.forecast": """BatchSizes DEVICES Device EpisodeSizes ModelSize Phase PromptSizes RoleMemory SLACK Setting
        StepForecast as_options beside_fact fit way_out
        calibrate_cpu compared duration preparation_seconds this_cpu
        device_named episode_batch forecast forecast_lines kept_image_bytes measure_conversations measure_episode
        measure_prompts model_size
        policy_gradient_batch policy_gradient_setting response_lengths supervised_setting this_device this_gpu""",
    "recipes.simulation": """Choice Cluster ModelParts PUBLISHED SimulatedPhase SimulatedStep Traffic Workload as_options
        best_step possible_layouts published_config simulate simulated simulation_lines""",
    "recipes.plan": "PlanConfig PlanOptions as_options fit main plan",
    "dataproto_server": "Backend",
}


@pytest.mark.parametrize("package", EXPORTS)
def test_a_package_exports_these_names(package):
    module = import_module(package)
    assert sorted(module.__all__) == sorted(EXPORTS[package].split())
    assert all(hasattr(module, name) for name in module.__all__)
