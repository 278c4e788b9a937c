"""A Sphinx directive that lists the options of a command, from the defaults of its configuration.

``.. options:: recipes.ppo.PPORunConfig recipes.grpo.GRPORunConfig`` lists those of the first that the second has not.
"""

import importlib
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

from recipes.options import options_of
from recipes.options.help_text import spelled_value, spelling
from recipes.options.option_table import Option, on_command_line


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("options", OptionTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class OptionTable(Directive):
    required_arguments = 1
    optional_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        listed, *others = (on_command_line(options_of(made(name))) for name in self.arguments)
        known = {option.name for options in others for option in options}
        found = nodes.Element()
        lines = table([option for option in listed if option.name not in known])
        self.state.nested_parse(StringList(lines, self.arguments[0]), self.content_offset, found)
        return found.children


def made(name: str) -> Any:
    module, _, config = name.rpartition(".")
    return getattr(importlib.import_module(module), config)()


def table(options: list[Option]) -> list[str]:
    lines = [".. list-table::", "   :header-rows: 1", "", "   * - option", "     - default", "     - what it is"]
    for option in options:
        default = "" if option.default in (None, "", (), {}) else f"``{spelled_value(option.default)}``"
        text = option.text.replace("\\", "\\\\").replace("*", "\\*").replace("`", "``").replace("|", "\\|")
        lines += [f"   * - ``{spelling(option)}``", f"     - {default}", f"     - {text}"]
    return lines
