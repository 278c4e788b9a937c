"""The options of a configuration as a command line, a help text and a file spell them."""

from recipes.options.config_file import config_as_yaml, file_arguments
from recipes.options.help_text import help_text
from recipes.options.idle_options import refuse_idle_options
from recipes.options.option_table import Option, options_of, with_plain_flags

__all__ = [
    "Option",
    "config_as_yaml",
    "file_arguments",
    "help_text",
    "options_of",
    "refuse_idle_options",
    "with_plain_flags",
]
