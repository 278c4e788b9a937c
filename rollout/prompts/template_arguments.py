"""What a chat template reads in addition to messages, such as ``tools`` and ``enable_thinking``."""

from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dataproto.errors import InvalidConfig, raised_as

OWN = frozenset({"messages", "add_generation_prompt"})
"""What each prompt sets itself."""


class _Generation(Extension):
    """The blocks ``{% generation %}`` of templates, with which transformers marks what an assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_variables(template: str) -> frozenset[str]:
    """The names that a chat template reads and does not set itself.

    >>> sorted(template_variables("{% set x = 1 %}{% if enable_thinking is defined %}{{ messages[x].content }}{% endif %}"))
    ['enable_thinking', 'messages']
    """
    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols, _Generation])
    environment.globals |= dict.fromkeys(("raise_exception", "strftime_now"))  # which transformers gives to templates
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


def reads_tools(tokenizer: Any) -> tuple[bool, bool]:
    """Whether the chat template reads ``tools``, and ``tool_calls`` of messages; also if that cannot be told, since the template
    then raises its own error.
    """
    try:
        template = tokenizer.get_chat_template(tools=[{}])
        return "tools" in template_variables(template), "tool_calls" in template
    except (ValueError, jinja2.TemplateError):
        return True, True


def check_template_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Checks that the tokenizer's chat template reads what it is given.

    Raises:
        InvalidConfig: it does not read one of the names, or there is no template that can be read.
    """
    what = "template_arguments: the checkpoint has no chat template to give them to"
    with raised_as(InvalidConfig, what, ValueError, jinja2.TemplateError):
        known = template_variables(tokenizer.get_chat_template(tools=arguments.get("tools"))) - OWN
    for name in arguments:
        if name not in known:
            takes = f"it reads {', '.join(sorted(known))}" if known else "it reads nothing but the messages"
            raise InvalidConfig(f"template_arguments: the chat template does not use {name!r}; {takes}")
