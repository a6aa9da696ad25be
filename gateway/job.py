"""One request on its way: what the client sent, and what every attempt at an engine carries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from gateway.records import RequestRecord
from gateway.relay import ClientSink, WholeAnswer
from gateway.schema import Api, ParsedRequest
from gateway.tenancy.door import ANYBODY, Visit
from gateway.tokenise import Prompt
from gateway.trace import Trace


class Inbound(msgspec.Struct, frozen=True):
    """One client request, off the wire. `passed_headers` go on to the engine as they are."""

    request_id: str
    api: Api
    trace: Trace
    body: bytes
    salt_header: str = ""
    quality_header: str = ""
    passed_headers: Mapping[str, str] = {}
    visit: Visit = ANYBODY
    task: asyncio.Task[None] | None = None
    """The one that serves it, where whoever made this knows it."""
    say: Callable[[WholeAnswer], None] | None = None
    """Sends an answer as soon as it is there, so that its client has it before the books are done;
    None: `serve` returns all answers.
    """


@dataclass(slots=True)
class Job:
    """One understood request; `record` is where attempts write down what became of it."""

    inbound: Inbound
    parsed: ParsedRequest
    prompt: Prompt
    salt: str
    sink: ClientSink
    record: RequestRecord
    short: bool
    """Too short for its prompt to matter."""
