"""Tools on their way into a chat template: what is offered, what was called, what came of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from local_engine.http.schema import MAX_TOOLS
from prfaas.errors import InvalidRequest
from prfaas.tokens import Tokenizer

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Tool = Mapping[str, Any]


def offered_tools(
    tools: Sequence[Any] | None, tool_choice: Any, parallel: bool | None, tokenizer: Tokenizer
) -> list[Tool] | None:
    """The tools as the template takes them, None if the model is to see none.

    They go to the template as they came. Raises InvalidRequest for what cannot be promised:
    answers are not constrained, so no call can be enforced, and no schema.
    """
    if tool_choice not in (None, "", "none", "auto"):
        raise InvalidRequest(
            "tool_choice: this engine constrains no answers; only none and auto are supported",
            param="tool_choice",
        )
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}", param="tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    if parallel is False:
        raise InvalidRequest(
            "parallel_tool_calls: this engine constrains no answers; only true is supported",
            param="parallel_tool_calls",
        )
    if tool_choice == "none":
        return None
    if tokenizer.tool_template is None:
        raise InvalidRequest("tools: this model's chat template takes none", param="tools")
    return list(tools)


def template_calls(calls: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Calls of an earlier answer as templates take them, with arguments as an object.

    Raises InvalidRequest naming the field.
    """
    return [_template_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _template_call(call: Any, where: str) -> dict[str, Any]:
    function = _member(call, "function", dict, where)
    name = _member(function, "name", str, f"{where}.function")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        at = f"{where}.function.arguments"
        raise InvalidRequest(f"{at} is not a JSON object", param=at)
    made: dict[str, Any] = {
        "type": "function", "function": {"name": name, "arguments": arguments},
    }  # fmt: skip
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _check_tool(tool: Any, where: str) -> None:
    if _member(tool, "type", str, where) != "function":
        raise InvalidRequest(f"{where}.type: only function is supported", param=f"{where}.type")
    function = _member(tool, "function", dict, where)
    where += ".function"
    if not _NAME.fullmatch(_member(function, "name", str, where)):
        at = f"{where}.name"
        raise InvalidRequest(f"{at}: 1 to 64 letters, digits, _, . or -", param=at)
    for name, kind in (("description", str), ("parameters", dict)):
        if function.get(name) is not None:
            _member(function, name, kind, where)
    if function.get("strict"):
        at = f"{where}.strict"
        raise InvalidRequest(f"{at}: this engine constrains no answers", param=at)


def _member(holder: Any, name: str, kind: type[Any], where: str) -> Any:
    if not isinstance(holder, dict):
        raise InvalidRequest(f"{where} is not an object", param=where)
    value = holder.get(name)
    if not isinstance(value, kind):
        problem = "is missing" if value is None else "has the wrong type"
        raise InvalidRequest(f"{where}.{name} {problem}", param=f"{where}.{name}")
    return value
