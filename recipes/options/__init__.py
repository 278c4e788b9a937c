"""The options of a configuration as a command line, a help text and a file spell them."""

from recipes.options.command_line import exit_status, own_options, parse_config, parse_recipe, training_command
from recipes.options.config_file import settings_line, write_options
from recipes.options.help_text import show_help
from recipes.options.option_table import REQUIRED, options_of, refuse_idle_options

__all__ = [
    "REQUIRED",
    "exit_status",
    "options_of",
    "own_options",
    "parse_config",
    "parse_recipe",
    "refuse_idle_options",
    "settings_line",
    "show_help",
    "training_command",
    "write_options",
]
