"""The options of a configuration as a command line, a help text and a file spell them."""

from recipes.options.command_line import (
    asks_for_help,
    divided,
    exit_status,
    over,
    parse_config,
    parse_recipe,
    print_help,
)
from recipes.options.config_file import config_as_yaml, file_values, settings_line, write_options
from recipes.options.help_text import help_text, show_help
from recipes.options.option_table import REQUIRED, Option, options_of, refuse_idle_options

__all__ = [
    "REQUIRED",
    "Option",
    "asks_for_help",
    "config_as_yaml",
    "divided",
    "exit_status",
    "file_values",
    "help_text",
    "options_of",
    "over",
    "parse_config",
    "parse_recipe",
    "print_help",
    "refuse_idle_options",
    "settings_line",
    "show_help",
    "write_options",
]
