"""The options of a configuration as a command line, a help text and a file spell them."""

from recipes.options.command_line import (
    asks_for_help,
    divided,
    exit_status,
    parse_config,
    parse_recipe,
    print_help,
)
from recipes.options.config_file import config_as_yaml, file_arguments, write_options
from recipes.options.help_text import help_text, show_help
from recipes.options.idle_options import refuse_idle_options
from recipes.options.option_table import Option, options_of, with_plain_flags

__all__ = [
    "Option",
    "asks_for_help",
    "config_as_yaml",
    "divided",
    "exit_status",
    "file_arguments",
    "help_text",
    "options_of",
    "parse_config",
    "parse_recipe",
    "print_help",
    "refuse_idle_options",
    "show_help",
    "with_plain_flags",
    "write_options",
]
