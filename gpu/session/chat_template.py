"""Chat templates: messages in, the text that a model was trained to continue out.

A template is Jinja source that comes with a checkpoint, so it runs in a sandbox and sees what Hugging Face's own
renderer gives it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...core.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]
"""One turn: "role", "content", and further keys that the template of the model reads."""


class ChatTemplate:
    """A compiled template. `special_tokens` are the names that it may use, such as bos_token.
    ConfigError if it is no template."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], source: str) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ConfigError.of(source, "chat_template", f"is no Jinja template: {error}") from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Message] = ()
    ) -> str:
        """Return the text of a conversation, with the tools that a model may call, ending where it is to go on.
        InvalidRequest for messages that the template refuses."""
        variables = {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(f"the chat template of {self._source} refuses these messages: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training;
    here it is only what is inside."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way to declare it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
