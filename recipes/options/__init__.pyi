from .command_line import (
    exit_status as exit_status,
    own_options as own_options,
    parse_config as parse_config,
    parse_recipe as parse_recipe,
    training_command as training_command,
)
from .config_file import settings_line as settings_line, write_options as write_options
from .help_text import show_help as show_help
from .option_table import (
    REQUIRED as REQUIRED,
    options_of as options_of,
    refuse_idle_options as refuse_idle_options,
)
