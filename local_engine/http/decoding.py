"""Raw body to typed request; errors name the field as a client would write it."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from prfaas.errors import InvalidRequest

Body = TypeVar("Body", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_SHOWN_CHARS = 64


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """The typed request. Raises InvalidRequest; `param` names the field where there is one."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _of_validation(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def _of_validation(text: str) -> InvalidRequest:
    """msgspec says what and where in one sentence; split it into message and `param`."""
    where = _PATH.search(text)
    path = where["path"] if where else ""
    problem = text[: where.start()] if where else text
    if unknown := _UNKNOWN.match(problem):
        param = _join(path, unknown["name"])
        return InvalidRequest(f"unrecognized field: {param}", param=param)
    if missing := _MISSING.match(problem):
        param = _join(path, missing["name"])
        return InvalidRequest(f"missing required field: {param}", param=param)
    problem = problem[:1].lower() + problem[1 : _SHOWN_CHARS * 4]
    if not path:
        return InvalidRequest(f"the body is malformed: {problem}")
    return InvalidRequest(f"{path}: {problem}", param=path)


def _join(path: str, name: str) -> str:
    name = name[:_SHOWN_CHARS]
    return f"{path}.{name}" if path else name
