"""Errors as whole answers, and heads of answers as bytes, for whichever server sends them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus

import msgspec

from gateway.relay import WholeAnswer
from prfaas.errors import PrfaasError, Unauthorized, openai_body

REQUEST_ID_HEADER = "x-request-id"

_REASONS = {status.value: status.phrase for status in HTTPStatus}


def error_answer(error: PrfaasError, status: int | None = None) -> WholeAnswer:
    """In OpenAI's shape, with Retry-After where the error says when."""
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    body = msgspec.json.encode(openai_body(error))
    return WholeAnswer(error.http_status if status is None else status, headers, body)


class AnswerHeads:
    """Writes heads of HTTP/1.1 answers; keeps this second's date. Nothing to close."""

    def __init__(self) -> None:
        self._second = 0
        self._date = ""

    def head(self, status: int, fields: Iterable[tuple[str, str]], framing: str) -> bytes:
        """`framing` is a whole line. Values come from parsers of HTTP or from us: they hold no
        line breaks."""
        now = int(time.time())
        if now != self._second:
            self._second, self._date = now, formatdate(now, usegmt=True)
        text = f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n{framing}date: {self._date}\r\n"
        for name, value in fields:
            text += f"{name}: {value}\r\n"
        return (text + "\r\n").encode("latin-1", "replace")
