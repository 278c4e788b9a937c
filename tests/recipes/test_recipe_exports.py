"""The public names of recipe packages: adding or losing one is a decision."""

from importlib import import_module

import pytest

EXPORTS = {
    "recipes.run": """PolicyGradientConfig RunConfig StepFunction StepState SupervisedConfig SupervisedTask attempts
        evaluate evaluate_samples greedy_evaluation held_out_evaluation launch_supervised measure_rollouts
        next_token_loss recorded_run run run_supervised train""",
}


@pytest.mark.parametrize("package", EXPORTS)
def test_a_package_exports_these_names(package):
    module = import_module(package)
    assert sorted(module.__all__) == sorted(EXPORTS[package].split())
    assert all(hasattr(module, name) for name in module.__all__)
