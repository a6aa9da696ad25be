"""The processes and lines of a fleet: started, looked at, made to fail, stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from prfaas.errors import PrfaasError
from prfaas.testing.link import LinkShape
from prfaas.testing.link_process import LinkProcess
from prfaas.up.client import OpenAIClient
from prfaas.up.cluster import paired, wait_cluster
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import FleetFault, FleetLink
from prfaas.up.process import ProcessSpec
from prfaas.up.stack import READY_TIMEOUT_S
from prfaas.up.supervisor import Supervisor

AT_ONCE = 8
"""Processes that start together: each takes a second or two of a core."""
PAIRED_TIMEOUT_S = 120.0
_STOP_MARGIN_S = 5.0
_CLIENT_TIMEOUT_S = 30.0


class FleetProcesses:
    """Owns what a fleet consists of while it runs; end with `stop`, whatever `start` said."""

    def __init__(
        self, plan: FleetPlan, say: Callable[[str], None], cores: Mapping[str, int] | None = None
    ) -> None:
        """`cores`: of processes by name; the others run where the caller may.

        Raises ConfigError for settings that are wrong.
        """
        self.plan = plan
        self._say = say
        cores = cores or {}
        self._specs = {
            spec.name: replace(spec, core=cores.get(spec.name))
            for spec in (*plan.prefill_side(), *plan.decode_side(), *plan.gateways())
        }
        self._links: dict[str, LinkProcess] = {}
        self._lines = AsyncExitStack()
        grace_s = plan.base.limits.drain_timeout_s + _STOP_MARGIN_S
        self.supervisor = Supervisor(stop_grace_s=grace_s)

    async def start(self) -> None:
        """Until every gateway sees every engine ready and paired. Raises PrfaasError."""
        await self._draw_lines()
        specs = list(self._specs.values())
        gateways = specs[-self.plan.fleet.gateways :]
        for group in (*_groups(specs[: -len(gateways)], AT_ONCE), gateways):
            self._say(f"starting {', '.join(spec.name for spec in group)}")
            await self.supervisor.start(group, READY_TIMEOUT_S)
        await self.wait_paired()

    async def stop(self) -> dict[str, int | None]:
        """Stop everything that runs; exit statuses by name."""
        try:
            return await self.supervisor.stop_all()
        finally:
            await self._lines.aclose()

    async def wait_paired(self) -> None:
        """Every gateway sees every engine ready, and paired with every instance."""
        for url in self.plan.gateway_urls:
            async with OpenAIClient(url, timeout_s=_CLIENT_TIMEOUT_S) as gateway:
                await wait_cluster(
                    gateway,
                    "all engines and instances",
                    lambda cluster: all(
                        engine["local"]["load"]["age_s"] < cluster["max_age_s"]
                        and (not self.plan.instances or paired(engine))
                        for engine in cluster["engines"]
                    ),
                    PAIRED_TIMEOUT_S,
                )

    async def carry_out(self, fault: FleetFault) -> None:
        """Raises PrfaasError where it does not fit how things stand."""
        try:
            if fault.do == "link":
                link = self._links[fault.what]
                if fault.link is not None:
                    await link.set_shape(_shape(fault.link))
                if fault.drop:
                    await link.drop_connections()
            elif fault.do == "start":
                await self.supervisor.start((self._specs[fault.what],), READY_TIMEOUT_S)
            elif fault.do == "kill":
                await self.supervisor.kill(fault.what)
            elif fault.do == "drain":
                status = await self.supervisor.stop(fault.what)
                if status:
                    raise PrfaasError(f"{words(fault)}: it ended with status {status}")
            else:
                self.supervisor.find(fault.what).pause(fault.do == "pause")
        except KeyError as exc:
            raise PrfaasError(f"{words(fault)}: it does not run") from exc

    async def _draw_lines(self) -> None:
        """One line for each peer, with a port for each of its instances."""
        for each in self.plan.instances:
            link = self._links.get(each.peer.name)
            if link is not None:
                await link.forward("127.0.0.1", each.port, listen_port=each.line_port)
                continue
            shape = _shape(each.peer.link)
            link = LinkProcess("127.0.0.1", each.port, shape, listen_port=each.line_port)
            self._links[each.peer.name] = await self._lines.enter_async_context(link)


def words(fault: FleetFault) -> str:
    """What happens, for people."""
    parts = [fault.do, fault.what]
    if fault.link is not None:
        parts.append(f"{fault.link.mbit_s:g} Mbit/s, {fault.link.rtt_ms:g} ms")
    if fault.drop:
        parts.append("connections reset")
    return " ".join(parts)


def _groups(specs: Sequence[ProcessSpec], size: int) -> list[Sequence[ProcessSpec]]:
    return [specs[at : at + size] for at in range(0, len(specs), size)]


def _shape(link: FleetLink) -> LinkShape:
    return LinkShape(link.mbit_s * 1e6, link.rtt_ms / 1e3)
