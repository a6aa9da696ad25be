"""Chat templates: a model's Jinja template turns messages into the text it was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prfaas.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]
_TOOL_TEMPLATE = "tool_use"
_DEFAULT_TEMPLATE = "default"


class ChatTemplate:
    """The compiled template or templates of one model; nothing to close.

    `sources`: template text by name; a model with one has it under "default", `tool_use` is taken
    for requests with tools. `special_tokens`: variables such as bos_token that templates refer to.
    Raises ConfigError if a template does not compile.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._known = {**environment.globals, "documents": None, **special_tokens}
        """What all prompts have in common."""
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise ConfigError(
                    f"chat template {name!r} does not compile: {error}", field="chat_template"
                ) from error
        with_tools = sources.get(_TOOL_TEMPLATE, sources.get(_DEFAULT_TEMPLATE, ""))
        asked_for = meta.find_undeclared_variables(environment.parse(with_tools))
        self.tool_source = with_tools if "tools" in asked_for else None
        """Text of the template that renders tools; None: they would be left out."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text. Raises InvalidRequest if there is no template or it refuses these."""
        template = self._templates.get(_TOOL_TEMPLATE if tools else _DEFAULT_TEMPLATE)
        template = template or self._templates.get(_DEFAULT_TEMPLATE)
        if template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        variables = {
            **self._known,
            **template_kwargs,
            "messages": [_plain(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # As `render`, which puts the same variables together anew each time.
            context = template.new_context(variables, shared=True)
            return "".join(template.root_render_func(context))
        except Exception as error:  # whatever a template trips over is in the caller's messages
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here, just its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it as a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment model authors test their templates in: that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this one escapes nothing for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _plain(message: Message) -> Message:
    """The message as most templates want it: no null fields, text parts joined by newlines."""
    fields = {name: value for name, value in message.items() if value is not None}
    content = fields.get("content")
    if isinstance(content, list):
        fields["content"] = "\n".join(_text_of(part) for part in content)
    return fields


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(f"content part of type {kind!r} is not text", param="messages")
    return text
