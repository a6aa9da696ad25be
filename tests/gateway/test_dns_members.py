"""DNS names as engines and instances, from a real server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr

from gateway.dns_members import find_engines, find_peers
from prfaas.discovery_settings import DnsEngines, DnsPeers
from prfaas.dns_names import Names
from prfaas.errors import ConfigError, PeerUnavailable
from prfaas.testing.dns_server import DnsServer, dns_server

ENGINES, SERVICE = "engines.test", "_http._tcp.engines.test"
TIMEOUT_S = 0.5


@pytest.fixture
async def server() -> AsyncIterator[DnsServer]:
    records = {
        (ENGINES, "A"): ["10.0.0.2", "10.0.0.1"],
        (ENGINES, "AAAA"): ["fd00::1"],
        (SERVICE, "SRV"): [
            "5 10 8000 d-1.engines.test.",
            "5 10 8000 d-0.engines.test.",
            "9 10 8000 spare.engines.test.",
        ],
        ("d-0.engines.test", "A"): ["10.0.0.1"],
        ("d-1.engines.test", "A"): ["10.0.0.2"],
        ("spare.engines.test", "A"): ["10.0.0.9"],
    }
    async with dns_server(records) as made:
        yield made


async def test_every_address_is_an_engine(server: DnsServer) -> None:
    names = Names(server.address, TIMEOUT_S)
    asked = DnsEngines(name=ENGINES, port=9000, agent_port=8101)
    members, ttl_s = await find_engines(names, asked, tls=False)
    assert [(e.name, e.url, e.agent) for e in members.engines] == [
        ("engines-10.0.0.1", "http://10.0.0.1:9000", "10.0.0.1:8101"),
        ("engines-10.0.0.2", "http://10.0.0.2:9000", "10.0.0.2:8101"),
        ("engines-fd00::1", "http://[fd00::1]:9000", "[fd00::1]:8101"),
    ]
    assert [e.tls_name for e in members.engines] == [None] * 3
    assert ttl_s == 1
    keyed = asked.model_copy(
        update={"api_key": SecretStr("key"), "apis": ("responses",), "max_running": 8}
    )
    members, _ = await find_engines(names, keyed, tls=False)
    assert {e.api_key.get_secret_value() for e in members.engines if e.api_key} == {"key"}
    assert {(e.apis, e.max_running) for e in members.engines} == {(("responses",), 8)}
    members, _ = await find_engines(names, asked, tls=True)
    assert {e.tls_name for e in members.engines} == {ENGINES}


async def test_every_target_of_the_best_priority_is_an_engine_of_its_name(
    server: DnsServer,
) -> None:
    asked = DnsEngines(name=SERVICE, kind="service")
    members, _ = await find_engines(Names(server.address, TIMEOUT_S), asked, tls=False)
    assert [(e.name, e.url) for e in members.engines] == [
        ("d-0", "http://10.0.0.1:8000"),
        ("d-1", "http://10.0.0.2:8000"),
    ]


async def test_instances_are_called_as_their_targets(server: DnsServer) -> None:
    asked = DnsPeers(name=SERVICE, peer="p", link_class="lan")
    members, _ = await find_peers(Names(server.address, TIMEOUT_S), asked, tls=True)
    assert [(p.peer, p.instance, p.watch, p.tls_name) for p in members.peers] == [
        ("p", "d-0", "10.0.0.1:8000", "d-0.engines.test"),
        ("p", "d-1", "10.0.0.2:8000", "d-1.engines.test"),
    ]


async def test_two_ports_of_one_host_are_two_engines(server: DnsServer) -> None:
    server.records[SERVICE, "SRV"] = ["0 0 8000 d-0.engines.test.", "0 0 8001 d-0.engines.test."]
    asked = DnsEngines(name=SERVICE, kind="service")
    members, _ = await find_engines(Names(server.address, TIMEOUT_S), asked, tls=False)
    assert [e.name for e in members.engines] == ["d-0", "d-0-8001"]


async def test_targets_that_begin_alike_are_all_engines(server: DnsServer) -> None:
    """As pods of several namespaces are."""
    server.records[SERVICE, "SRV"] = [f"0 0 8000 d-0.{at}.test." for at in "abc"]
    for at in "abc":
        server.records[f"d-0.{at}.test", "A"] = [f"10.0.1.{ord(at)}"]
    asked = DnsEngines(name=SERVICE, kind="service")
    members, _ = await find_engines(Names(server.address, TIMEOUT_S), asked, tls=False)
    assert [(e.name, e.url) for e in members.engines] == [
        ("d-0", "http://10.0.1.97:8000"),
        ("d-0-8000", "http://10.0.1.98:8000"),
        ("d-0-8000-10.0.1.99", "http://10.0.1.99:8000"),
    ]


async def test_a_target_that_does_not_resolve_keeps_its_address(server: DnsServer) -> None:
    names = Names(server.address, TIMEOUT_S)
    first, _ = await names.services(SERVICE)
    del server.records["d-1.engines.test", "A"]
    server.records[SERVICE, "SRV"].append("5 10 8000 new.engines.test.")
    assert (await names.services(SERVICE))[0] == first


@pytest.mark.parametrize("rcode", ["NXDOMAIN", "SERVFAIL", "REFUSED"])
@pytest.mark.parametrize("kind", ["address", "service"])
async def test_what_fails_is_an_error_and_no_empty_set(
    server: DnsServer, rcode: str, kind: str
) -> None:
    server.rcode = rcode
    asked = DnsEngines(name=ENGINES if kind == "address" else SERVICE, kind=kind)
    with pytest.raises(PeerUnavailable):
        await find_engines(Names(server.address, TIMEOUT_S), asked, tls=False)


async def test_neither_silence_nor_a_service_that_is_off_is_an_empty_set(
    server: DnsServer,
) -> None:
    names = Names(server.address, TIMEOUT_S)
    server.records[SERVICE, "SRV"] = ["0 0 0 ."]
    with pytest.raises(PeerUnavailable):
        await names.services(SERVICE)
    server.silent = True
    with pytest.raises(PeerUnavailable):
        await names.addresses(ENGINES, 80)


@pytest.mark.parametrize("address", ["dns.test:53", "10.0.0.1", "10.0.0.1:dns"])
def test_a_server_is_named_by_address_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="dns_server"):
        Names(address, TIMEOUT_S)
