"""Watch clients on real gRPC: full state first, and anew after every kind of trouble."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gateway import watch
from gateway.cluster_view import ClusterView
from gateway.watch import WatchClient, watch_endpoints
from prfaas.dialling import Endpoint, checked_endpoint, open_files
from prfaas.errors import ConfigError
from prfaas.hashing import block_chain
from prfaas.settings import TlsSettings
from prfaas.snapshot import Outcome
from prfaas.telemetry import WatchUpdate
from prfaas.testing.gateway_setup import ENGINE, PLACE, d_engine, gateway_settings, link, until
from prfaas.testing.pki import Pki
from prfaas.testing.scripted_agent import ScriptedAgent, scripted_agent

CHAIN = block_chain(list(range(64)), 16)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(watch, "LAST_BACKOFF_S", 0.05)


@asynccontextmanager
async def following(
    address: str,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    tls: TlsSettings | None = None,
    tls_name: str | None = None,
) -> AsyncIterator[ClusterView]:
    settings = gateway_settings(d_watch=address, limits={"watch_stale_s": 0.3})
    view = ClusterView(settings.gateway, settings.limits)
    endpoint = checked_endpoint(address, open_files(tls, "client", "tls"), tls_name, "d")
    client = WatchClient(view, ENGINE, endpoint, "gw", settings.limits, on_outcome)
    task = asyncio.create_task(client.run())
    try:
        yield view
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not view.feeds[ENGINE].connected


@asynccontextmanager
async def agent_at_d() -> AsyncIterator[ScriptedAgent]:
    async with scripted_agent(d_engine(), (link(),)) as agent:
        agent.blocks = tuple(CHAIN[:2])
        yield agent


async def test_state_and_changes_arrive() -> None:
    outcomes: list[Outcome] = []
    async with agent_at_d() as agent, following(agent.address, outcomes.append) as view:
        await until(lambda: view.feeds[ENGINE].connected, "the full event")
        snapshot = view.snapshot(ENGINE, {16: CHAIN})
        assert snapshot.local.matched_tokens == 32
        assert snapshot.local.load.queue_tokens == 2000
        assert view.feeds[ENGINE].links

        agent.change(queue_tokens=5)
        agent.stored(CHAIN[2])
        sent = Outcome(
            "t1", "staged", peer="p", instance="p-0", raw_bytes=5, phases={"total": 1.5},
            tried=("p/p-0",),
        )  # fmt: skip
        agent.outcome(sent)
        await until(lambda: outcomes, "the outcome")
        assert outcomes == [sent]
        snapshot = view.snapshot(ENGINE, {16: CHAIN})
        assert snapshot.local.load.queue_tokens == 5
        assert snapshot.local.matched_tokens == 48


async def test_heartbeats_keep_the_feed_young() -> None:
    async with agent_at_d() as agent, following(agent.address) as view:
        await until(lambda: view.feeds[ENGINE].connected, "the full event")
        await asyncio.sleep(0.5)  # longer than the limit of silence
        assert view.snapshot(ENGINE, {}).local.load.age_s < 0.3
        assert agent.streams == 1


async def test_an_ended_stream_is_opened_anew_with_full_state() -> None:
    async with agent_at_d() as agent, following(agent.address) as view:
        await until(lambda: view.index.blocks(ENGINE) == 2, "the full event")
        agent.blocks = ()
        agent.end_streams()
        await until(lambda: agent.streams == 2, "a second stream")
        await until(lambda: view.feeds[ENGINE].connected, "its full event")
        assert view.index.blocks(ENGINE) == 0


@pytest.mark.parametrize("seq", [5, 1])
async def test_a_skipped_or_repeated_sequence_number_starts_anew(seq: int) -> None:
    """Case 8: events were lost, so what is indexed cannot be trusted."""
    async with agent_at_d() as agent, following(agent.address) as view:
        await until(lambda: view.feeds[ENGINE].connected, "the full event")
        agent.push(WatchUpdate(1, False))
        agent.push(WatchUpdate(seq, False))
        await until(lambda: agent.streams == 2, "a second stream")


async def test_a_fault_of_ours_costs_a_stream_and_not_the_feed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(outcome: Outcome) -> None:
        raise ZeroDivisionError

    async with agent_at_d() as agent, following(agent.address, fails) as view:
        await until(lambda: view.feeds[ENGINE].connected, "the full event")
        agent.outcome(Outcome("t1", "staged", peer="p", instance="p-0"))
        await until(lambda: agent.streams >= 2, "a second stream")
        await until(lambda: view.feeds[ENGINE].connected, "its full event")
    assert "cannot be taken in" in caplog.text


async def test_silence_is_taken_for_an_outage() -> None:
    async with agent_at_d() as agent, following(agent.address) as view:
        await until(lambda: view.feeds[ENGINE].connected, "the full event")
        agent.silent = True
        await until(lambda: agent.streams >= 2, "a second stream", timeout_s=3)


async def test_an_agent_that_comes_back_is_found(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as first:
        agent = await first.enter_async_context(agent_at_d())
        async with following(agent.address) as view:
            await until(lambda: view.feeds[ENGINE].connected, "the first agent")
            await first.aclose()
            await until(lambda: not view.feeds[ENGINE].connected, "the loss to be noticed")
            assert not view.cache_known(ENGINE)
            port = int(agent.address.rsplit(":", 1)[1])
            async with scripted_agent(d_engine(epoch="d2"), (link(),), port=port):
                await until(lambda: view.feeds[ENGINE].engine.epoch == "d2", "the second agent")
                assert view.cache_known(ENGINE)
    assert "lost the feed of d-0" in caplog.text


async def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with following("127.0.0.1:9"):
            await asyncio.sleep(0.4)
    assert len([r for r in caplog.records if "lost the feed" in r.message]) == 1


async def test_places_are_followed_by_their_own_name() -> None:
    async with scripted_agent(d_engine(name="whatever it calls itself"), ()) as agent:
        settings = gateway_settings(p_watch=agent.address)
        view = ClusterView(settings.gateway, settings.limits)
        client = WatchClient(
            view, PLACE, Endpoint(agent.address), "gw", settings.limits, lambda outcome: None
        )
        task = asyncio.create_task(client.run())
        await until(lambda: view.feeds[PLACE].engine.ready, "the full event")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- mutual TLS ---


async def test_certificates_that_change_cost_no_moment_of_the_feed(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    async with (
        scripted_agent(d_engine(), (link(),), tls=pki.settings("d-agent")) as agent,
        following(agent.address, tls=pki.settings("gw"), tls_name="d-agent") as view,
    ):
        await until(lambda: view.feeds[ENGINE].connected, "the full event")
        lost: list[str] = []
        view.disconnected = lost.append  # type: ignore[method-assign]
        for streams in (2, 3):
            pki.rotate("gw")
            await until(lambda n=streams: agent.streams == n, "a stream over a new connection")
            agent.change(queue_tokens=streams)
            await until(lambda n=streams: view.feeds[ENGINE].engine.queue_tokens == n, "events")
        assert lost == []
        assert view.snapshot(ENGINE, {}).local.load.age_s < 0.3
        del view.disconnected


@pytest.mark.parametrize("what", ["plain", "another CA", "another name"])
async def test_who_does_not_fit_is_not_watched(tmp_path: Path, what: str) -> None:
    pki, stranger = Pki(tmp_path / "pki"), Pki(tmp_path / "stranger")
    tls = {"plain": None, "another CA": stranger.settings("gw"), "another name": pki.settings("gw")}
    async with scripted_agent(d_engine(), (), tls=pki.settings("d-agent")) as agent:
        name = "p0" if what == "another name" else None
        async with following(agent.address, tls=tls[what], tls_name=name) as view:
            await asyncio.sleep(0.4)
            assert agent.streams == 0
            assert not view.feeds[ENGINE].connected


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"d_watch": "10.0.0.1:1"}, "gateway.engines d-0: '10.0.0.1:1' is not a loopback address"),
        ({"p_watch": "p.example:1"}, "gateway.peers p/p-0: 'p.example:1' is not a loopback"),
        ({"p_watch": "127.0.0.1"}, "gateway.peers p/p-0: '127.0.0.1' is not host:port"),
        ({"p_watch": "unix:/tmp/x"}, "gateway.peers p/p-0: 'unix:/tmp/x' is not host:port"),
        ({"p_watch": "::1:5"}, "gateway.peers p/p-0: '::1:5' is not host:port"),
    ],
)
def test_without_tls_only_loopback_is_watched(fields: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        watch_endpoints(gateway_settings(**fields).gateway, None)
    assert says in caught.value.message


def test_with_tls_any_host_may_be_watched(tmp_path: Path) -> None:
    tls = Pki(tmp_path).settings("gw")
    settings = gateway_settings(d_watch="[2001:db8::1]:1", p_watch="p.example:1", tls=tls)
    found = watch_endpoints(settings.gateway, open_files(tls, "client", "gateway.tls"))
    assert {place: each.address for place, each in found.items()} == {
        ENGINE: "[2001:db8::1]:1",
        PLACE: "p.example:1",
    }
