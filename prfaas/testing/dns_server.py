"""A small DNS server on loopback whose records, and failures, a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


@dataclass
class DnsServer(asyncio.DatagramProtocol):
    """Answers with `records` by (name, type); `rcode` answers everything with that error instead.

    `silent`: it says nothing at all.
    """

    records: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    ttl_s: int = 1
    rcode: str = ""
    silent: bool = False
    asked: int = 0
    port: int = 0
    _transport: asyncio.DatagramTransport | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.asked += 1
        if self.silent or self._transport is None:
            return
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), question.rdtype
        known = self.records.get((name, dns.rdatatype.to_text(kind)))
        if self.rcode:
            answer.set_rcode(dns.rcode.from_text(self.rcode))
        elif known:
            answer.answer.append(
                dns.rrset.from_text_list(question.name, self.ttl_s, "IN", kind, known)
            )
        elif not any(each == name for each, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        answer.flags |= dns.flags.RA
        self._transport.sendto(answer.to_wire(), addr)


@asynccontextmanager
async def dns_server(records: dict[tuple[str, str], list[str]]) -> AsyncIterator[DnsServer]:
    """A running DnsServer on a free UDP port of loopback."""
    server = DnsServer(dict(records))
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: server, local_addr=("127.0.0.1", 0))
    server.port = transport.get_extra_info("sockname")[1]
    try:
        yield server
    finally:
        transport.close()
