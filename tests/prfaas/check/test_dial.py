"""Dialling over real sockets: what is wrong with an address, a certificate or a clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from prfaas.certs import make_certs
from prfaas.check.dial import Refused, ask, reach, shake
from prfaas.check.findings import Findings, Level
from prfaas.check.tls_part import clock, own_files, watch
from prfaas.settings import TlsSettings
from prfaas.testing.gateway_setup import p_engine
from prfaas.testing.scripted_agent import scripted_agent
from prfaas.up.stack import free_ports


def tls_of(directory: Path, name: str, *peers: str) -> TlsSettings:
    where = directory / name
    return TlsSettings(
        cert=where / "cert.pem", key=where / "key.pem", ca=directory / "ca.pem", peers=peers
    )


async def why(address: str, tls: TlsSettings | None, name: str | None) -> list[tuple[str, str]]:
    findings = Findings()
    files = own_files(tls, "client", "gateway.tls", Findings())
    await watch("peer p", address, tls, files, name, "gateway.peers p", "gateway", 10.0, findings)
    return [(each.found, each.mend) for each in findings if each.level is Level.FAIL]


async def test_a_certificate_for_another_name_or_of_another_ca_is_told_apart(
    tmp_path: Path,
) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    make_certs(ours, ("gateway", "p0"), days=30)
    make_certs(others, ("gateway",), days=30)
    gateway = tls_of(ours, "gateway")
    async with scripted_agent(p_engine(), tls=tls_of(ours, "p0")) as agent:
        assert await why(agent.address, gateway, "p0") == []
        ((found, mend),) = await why(agent.address, gateway, "p1")
        assert "mismatch" in found.lower()
        assert mend.startswith("issue its certificate for p1")
        ((found, mend),) = await why(agent.address, tls_of(others, "gateway"), "p0")
        assert mend == "add the CA of its certificate to gateway.tls.ca"
        ((found, mend),) = await why(agent.address, None, None)  # it expects TLS, we bring none
        assert mend


async def test_addresses_that_lead_nowhere() -> None:
    (port,) = free_ports(1)
    with pytest.raises(Refused) as caught:
        await reach("127.0.0.1", port, 5.0)
    assert caught.value.word == "refused"
    with pytest.raises(Refused) as caught:
        await reach("nowhere.invalid", port, 20.0)
    assert caught.value.word in ("address", "timeout")  # some resolvers just say nothing
    with pytest.raises(Refused) as caught:
        await ask(f"http://127.0.0.1:{port}/health", 5.0)
    assert caught.value.word == "refused"


async def test_a_server_without_tls_is_no_server_with_tls(tmp_path: Path) -> None:
    make_certs(tmp_path, ("gateway",), days=30)
    async with http_server(date=None) as port:
        with pytest.raises(Refused) as caught:
            await shake("127.0.0.1", port, tls_of(tmp_path, "gateway"), "p0", 10.0)
    assert caught.value.word == "tls"


@asynccontextmanager
async def http_server(date: str | None) -> AsyncIterator[int]:
    async def health(request: web.Request) -> web.Response:
        return web.Response(text="no JSON", headers={"date": date} if date else {})

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_a_clock_that_is_years_behind_is_told_by_the_date_of_an_answer() -> None:
    async with http_server(date="Thu, 01 Jan 2015 00:00:00 GMT") as port:
        answer = await ask(f"http://127.0.0.1:{port}/health", 10.0)
    assert answer.status == 200
    assert answer.body is None
    assert answer.ahead_s is not None
    assert answer.ahead_s < -86400


@pytest.mark.parametrize(
    ("ahead_s", "within_s", "levels"),
    [
        (None, 0.0, []),
        (0.4, 0.1, []),
        (1.4, 0.5, []),  # the way may have taken that
        (-3.0, 0.1, [Level.WARN]),
        (60.0, 0.1, [Level.FAIL]),
    ],
)
def test_clocks_are_judged_by_what_the_way_cannot_explain(
    ahead_s: float | None, within_s: float, levels: list[Level]
) -> None:
    findings = Findings()
    clock("engine", ahead_s, within_s, findings)
    assert [each.level for each in findings] == levels
