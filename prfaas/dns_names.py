"""Hosts behind DNS names: addresses (A, AAAA) and services (SRV), and their TTL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver

from prfaas.errors import ConfigError, PeerUnavailable

MAX_HOSTS = 1024
"""Behind one name; one that has more is wrong."""
_FAILURES = (dns.exception.DNSException, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class Host:
    """One that a name stands for."""

    label: str
    """First label of its own name; of an address without one, the label asked for and itself."""
    name: str
    """By which its certificate may be checked."""
    address: str
    port: int


class Names:
    """Asks a DNS server; nothing to close. Remembers targets, for when they do not resolve."""

    def __init__(self, server: str, timeout_s: float, key: str = "gateway.discovery") -> None:
        """`server`: `host:port` with an IP address; empty: the system's. Raises ConfigError that
        names it under `key`.
        """
        self._timeout_s = timeout_s
        self._targets: dict[str, str] = {}
        try:
            self._resolver = dns.asyncresolver.Resolver(configure=not server)
            if server:
                host, _, port = server.rpartition(":")
                self._resolver.nameservers = [host.strip("[]")]
                self._resolver.port = int(port)
        except (dns.exception.DNSException, OSError, ValueError) as exc:
            raise ConfigError(f"{key}.dns_server: {exc}") from exc

    async def addresses(self, name: str, port: int) -> tuple[list[Host], float]:
        """Hosts by their addresses in order, and for how many seconds that holds.

        Raises PeerUnavailable where the name has none, or nobody answers.
        """
        found, ttl_s = await self._addresses(name)
        label = name.partition(".")[0]
        return [Host(f"{label}-{each}", name.rstrip("."), each, port) for each in found], ttl_s

    async def services(self, name: str) -> tuple[list[Host], float]:
        """The same of a service: targets of the best priority, by their names.

        A target that does not resolve just now keeps its last address, and is left out without one.
        """
        try:
            answer = await self._ask(name, "SRV")
        except _FAILURES as exc:
            raise PeerUnavailable(f"{name}: {exc}") from exc
        records = sorted(
            (record.priority, record.target.to_text(omit_final_dot=True), record.port)
            for record in answer
        )
        best = [(target, port) for first, target, port in records if first == records[0][0]]
        if len(best) > MAX_HOSTS or not any(target for target, _ in best):
            raise PeerUnavailable(f"{name}: {len(best)} targets")
        asked = await asyncio.gather(*(self._target(target) for target, _ in best))
        ttl_s = min([_ttl_s(answer), *(each[1] for each in asked)])
        hosts = [
            Host(target.partition(".")[0], target, address, port)
            for (target, port), (address, _) in zip(best, asked, strict=True)
            if address
        ]
        if not hosts:
            raise PeerUnavailable(f"{name}: none of {len(best)} targets has an address")
        return hosts, ttl_s

    async def _target(self, target: str) -> tuple[str, float]:
        try:
            found, ttl_s = await self._addresses(target)
        except PeerUnavailable:
            return self._targets.get(target, ""), 0.0
        self._targets[target] = found[0]
        while len(self._targets) > 2 * MAX_HOSTS:
            self._targets.pop(next(iter(self._targets)))
        return found[0], ttl_s

    async def _addresses(self, name: str) -> tuple[list[str], float]:
        answers = await asyncio.gather(
            self._ask(name, "A"), self._ask(name, "AAAA"), return_exceptions=True
        )
        found: list[str] = []
        ttls: list[float] = []
        why: BaseException | None = None
        for answer in answers:
            if isinstance(answer, dns.resolver.Answer):
                found += [record.address for record in answer]
                ttls.append(_ttl_s(answer))
            elif not isinstance(answer, _FAILURES):
                raise answer
            elif not isinstance(answer, dns.resolver.NoAnswer):
                why = answer  # half of an answer is no answer: the other half would vanish
        if why is not None or not found:
            raise PeerUnavailable(f"{name}: {why or 'it has no address'}") from why
        if len(found) > MAX_HOSTS:
            raise PeerUnavailable(f"{name}: {len(found)} addresses")
        return sorted(found), min(ttls)

    async def _ask(self, name: str, kind: str) -> dns.resolver.Answer:
        return await self._resolver.resolve(
            name, kind, lifetime=self._timeout_s, search=None, raise_on_no_answer=True
        )


def told_apart(hosts: Iterable[Host]) -> list[tuple[str, Host]]:
    """With names of their own: those after the first of a label have their port in it too, and
    their address where that is taken as well.
    """
    found: dict[str, Host] = {}
    for host in hosts:
        longer = f"{host.label}-{host.port}"
        names = (host.label, longer, f"{longer}-{host.address}")
        free = next((name for name in names if name not in found), None)
        if free is not None:  # else it is the very same endpoint
            found[free] = host
    return list(found.items())


def _ttl_s(answer: dns.resolver.Answer) -> float:
    return float(answer.rrset.ttl) if answer.rrset is not None else 0.0


def authority(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
