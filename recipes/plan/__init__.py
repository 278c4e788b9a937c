"""What a run will take, from outside: memory and seconds of each phase of a step, before anything is loaded. No run imports it.

`plan` reads a recipe's options and data, `forecast` computes, and `fit` chooses layout and budgets. See docs/plan.md.
"""

from recipes.plan.command import main, plan
from recipes.plan.devices import DEVICES
from recipes.plan.fitting import as_options, fastest_layout, fit, way_out
from recipes.plan.forecast import Forecast, forecast
from recipes.plan.rows import BatchSizes, PromptSizes, response_lengths
from recipes.plan.setting import Setting

__all__ = [
    "DEVICES",
    "BatchSizes",
    "Forecast",
    "PromptSizes",
    "Setting",
    "as_options",
    "fastest_layout",
    "fit",
    "forecast",
    "main",
    "plan",
    "response_lengths",
    "way_out",
]
