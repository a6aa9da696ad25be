"""Each process of the stack gets a private file that its command accepts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prfaas.settings import Settings, load_settings
from prfaas.tls_files import check_files
from prfaas.up.stack import Stack, StackPlan, engine_cores, free_ports


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    tmp_path.chmod(0o700)
    base = load_settings(overrides={"engine": {"chunk_tokens": 128}, "limits": {"lease_s": 9.0}})
    plan = StackPlan(base=base, model=tmp_path / "m.gguf", served_model_name="m")
    return Stack.create(plan, tmp_path)


def config_of(stack: Stack, name: str) -> Settings:
    return load_settings(stack.directory / f"{name}.yaml")


def test_files_are_private_valid_and_agree(stack: Stack) -> None:
    specs = (*stack.engines_and_agents(), stack.gateway())
    names = ["p-engine", "p-agent", "d-agent", "d-engine", "gateway"]
    assert [spec.name for spec in specs] == names
    for name in names:
        assert (stack.directory / f"{name}.yaml").stat().st_mode & 0o777 == 0o600
        assert config_of(stack, name).limits.lease_s == 9.0
    gateway, agent = config_of(stack, "gateway").gateway, config_of(stack, "d-agent").agent
    prefill = config_of(stack, "p-agent").prefill
    d_engine, p_engine = config_of(stack, "d-engine").engine, config_of(stack, "p-engine").engine
    assert agent.transfer_keys == (gateway.transfer_key,)
    assert len(gateway.transfer_key.get_secret_value()) == 64
    assert gateway.peers[0].watch == f"127.0.0.1:{prefill.port}"
    assert agent.peers[0].instances[0].address == f"127.0.0.1:{prefill.port}"
    assert (gateway.peers[0].peer, gateway.peers[0].instance) == (prefill.peer, prefill.instance)
    assert agent.peers[0].name == prefill.peer
    assert gateway.engines[0].url == f"http://127.0.0.1:{d_engine.port}"
    assert gateway.engines[0].agent == f"127.0.0.1:{agent.port}"
    assert d_engine.port_socket == agent.socket
    assert p_engine.port_socket == prefill.socket
    assert d_engine.chunk_tokens == p_engine.chunk_tokens == 128
    ports = {gateway.port, d_engine.port, p_engine.port, agent.port, prefill.port}
    assert len(ports) == 5


def test_a_link_between_the_clusters_is_seen_from_d_only(stack: Stack) -> None:
    stack.prefill_side()
    stack.decode_side(prefill_port=5, agent={"hold_until_sealed": True})
    stack.gateway(prefill_port=5, settings={"offload": False}, name="local", port=0)
    agent = config_of(stack, "d-agent").agent
    assert agent.hold_until_sealed
    assert agent.peers[0].instances[0].address == "127.0.0.1:5"
    assert config_of(stack, "p-agent").prefill.port == stack.ports.p_agent
    local = config_of(stack, "local").gateway
    assert (local.port, local.offload) == (0, False)


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    plan = StackPlan(base=load_settings(), model=tmp_path, served_model_name="m")
    with pytest.raises(ValueError, match="open to others"):
        Stack.create(plan, tmp_path)


def test_keys_do_not_print(stack: Stack) -> None:
    assert stack.transfer_key not in repr(stack)
    assert stack.cache_secret not in repr(stack)


def test_free_ports_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert not set(free_ports(20, but=ports)) & set(ports)


def test_free_ports_are_none_that_an_outgoing_connection_may_be_given() -> None:
    lowest = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not lowest.exists():
        pytest.skip("this kernel does not say which these are")
    assert max(free_ports(20)) < int(lowest.read_text().split()[0])


def test_where_the_kernel_does_not_say_any_free_port_will_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("prfaas.up.stack._OUTGOING_PORTS", tmp_path / "absent")
    assert len(set(free_ports(20))) == 20


def test_engines_are_pinned_only_where_there_are_two_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 1, 2})
    assert engine_cores(True) == (1, 2)
    assert engine_cores(False) == (None, None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    assert engine_cores(True) == (None, None)


def test_with_tls_each_process_has_a_name_and_knows_whom_it_meets(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    plan = StackPlan(load_settings(), tmp_path / "m.gguf", "m", tls=True)
    stack = Stack.create(plan, tmp_path)
    stack.engines_and_agents()
    stack.gateway()
    gateway, agent = config_of(stack, "gateway").gateway, config_of(stack, "d-agent").agent
    prefill = config_of(stack, "p-agent").prefill
    names = {}
    for section, use in ((gateway, "client"), (agent, "both"), (prefill, "server")):
        assert section.tls is not None
        names[use] = check_files(section.tls, use).names  # type: ignore[arg-type]
        assert section.tls.key.resolve().stat().st_mode & 0o777 == 0o600
    assert names == {"client": ("gateway",), "both": ("d-agent",), "server": ("p-agent",)}
    assert (agent.tls.peers, prefill.tls.peers) == (("gateway",), ("gateway", "d-agent"))
    assert gateway.engines[0].tls_name == "d-agent"
    assert gateway.peers[0].tls_name == agent.peers[0].instances[0].tls_name == "p-agent"
    (client,) = prefill.authorised
    assert (client.identity, client.models, client.tenants) == ("d-agent", ("m",), ("*",))


def test_p_may_stand_at_another_address_for_all_who_dial_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    model = tmp_path / "m.gguf"
    plan = StackPlan(load_settings(), model, "m", tls=True, prefill_host="198.18.0.1")
    stack = Stack.create(plan, tmp_path)
    stack.engines_and_agents()
    stack.gateway()
    where = f"198.18.0.1:{stack.ports.p_agent}"
    assert config_of(stack, "p-agent").prefill.host == "198.18.0.1"
    assert config_of(stack, "d-agent").agent.peers[0].instances[0].address == where
    assert config_of(stack, "gateway").gateway.peers[0].watch == where
    assert config_of(stack, "d-agent").agent.host == "127.0.0.1"
