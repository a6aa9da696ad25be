"""How the record of every request begins, decided about or passed on."""

from __future__ import annotations

import enum
from typing import Protocol

from gateway.ids import Ids
from gateway.records import RecordBook, RequestRecord
from gateway.tenancy.door import Visit
from gateway.trace import Trace


class Arrived(Protocol):
    """What is known of any request before its body was looked at."""

    @property
    def request_id(self) -> str: ...

    @property
    def api(self) -> enum.StrEnum: ...

    @property
    def trace(self) -> Trace: ...

    @property
    def visit(self) -> Visit: ...


def open_record(records: RecordBook, arrived: Arrived, ids: Ids, traced: bool) -> RequestRecord:
    """A record under a key of its own. `traced`: spans are exported, for those that ask for it."""
    trace = arrived.trace
    record = records.open(arrived.request_id, arrived.api._value_, trace.trace_id, ids.hex(16))
    record.tenant = arrived.visit.name
    if traced and trace.sampled:
        record.trace = trace
    return record
