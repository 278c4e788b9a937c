"""Forecasts: the memory, operations and time of a run, from the checkpoint's config, the sizes of its data and its options.

Nothing is loaded: parameters are counted on the meta device, images by their headers. See docs/plan.md.
"""

from recipes.forecast.batch_sizes import (
    BatchSizes,
    EpisodeSizes,
    PromptSizes,
    kept_image_bytes,
    measure_conversations,
    measure_episode,
    measure_prompts,
    preparation_seconds,
    response_lengths,
)
from recipes.forecast.calibration import calibrate_cpu, this_gpu
from recipes.forecast.cpu_speed import this_cpu, this_device
from recipes.forecast.devices import DEVICES, Device, device_named
from recipes.forecast.fitting import as_options, fit, way_out
from recipes.forecast.forecast_table import beside_fact, compared, duration, forecast_lines
from recipes.forecast.model_size import ModelSize, model_size
from recipes.forecast.role_memory import RoleMemory
from recipes.forecast.settings import (
    Setting,
    episode_batch,
    policy_gradient_batch,
    policy_gradient_setting,
    supervised_setting,
)
from recipes.forecast.step_forecast import SLACK, Phase, StepForecast, forecast

__all__ = [
    "DEVICES",
    "SLACK",
    "BatchSizes",
    "Device",
    "EpisodeSizes",
    "ModelSize",
    "Phase",
    "PromptSizes",
    "RoleMemory",
    "Setting",
    "StepForecast",
    "as_options",
    "beside_fact",
    "calibrate_cpu",
    "compared",
    "device_named",
    "duration",
    "episode_batch",
    "fit",
    "forecast",
    "forecast_lines",
    "kept_image_bytes",
    "measure_conversations",
    "measure_episode",
    "measure_prompts",
    "model_size",
    "policy_gradient_batch",
    "policy_gradient_setting",
    "preparation_seconds",
    "response_lengths",
    "supervised_setting",
    "this_cpu",
    "this_device",
    "this_gpu",
    "way_out",
]
