from .evaluation import (
    evaluate_samples as evaluate_samples,
    greedy_evaluation as greedy_evaluation,
    held_out_evaluation as held_out_evaluation,
)
from .loop import RunConfig as RunConfig, StepFunction as StepFunction, attempts as attempts, train as train
from .metrics import measure_rollouts as measure_rollouts
from .phases import StepState as StepState
from .policy_gradient import (
    PolicyGradientConfig as PolicyGradientConfig,
    evaluate as evaluate,
    run as run,
)
from .run_directory import recorded_run as recorded_run
from .supervised import (
    SupervisedConfig as SupervisedConfig,
    SupervisedTask as SupervisedTask,
    launch_supervised as launch_supervised,
    next_token_loss as next_token_loss,
    run_supervised as run_supervised,
)
