"""Two hosts' states meet in a real Redis, each for all of its workers."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.admission import FallbackBudget
from gateway.workers.files import members_copy
from gateway.workers.link import Hearers, WorkerLink
from gateway.workers.place import Place
from gateway.workers.state_process import StateProcess
from policies.registry import make_policy
from prfaas import following
from prfaas.clock import SYSTEM_CLOCK
from prfaas.cluster_state import Load, Member, Report, Shared
from prfaas.errors import ConfigError
from prfaas.testing.gateway_setup import ENGINE, gateway_settings
from prfaas.testing.redis_server import WHY_SKIPPED, RedisServer, found, redis_server
from prfaas.testing.waiting import eventually

LONG_S = 30.0


def place_at(directory: Path) -> Place:
    return Place(-1, 2, 0, directory, 4711, -1, -1)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with redis_server(tmp_path) as running:
        yield running


class Host:
    """One state, and a worker's link to it."""

    def __init__(self, process: StateProcess, link: WorkerLink) -> None:
        self.process, self.link = process, link

    async def tell(self, **fields: Any) -> Shared:
        return await self.link.exchange(Report(Member("w", **fields), 60.0))


async def started(stack: AsyncExitStack, **fields: Any) -> Host:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pw")))
    settings = gateway_settings(d_watch=None, peers=(), **fields)
    place = place_at(folder)
    process = StateProcess(place, settings, make_policy, SYSTEM_CLOCK)
    await stack.enter_async_context(process.running())
    link = WorkerLink(place.state_socket, 0, SYSTEM_CLOCK, 10.0)
    await link.members(10.0)

    async def apply(members: object) -> None:
        pass

    link.start(Hearers(process.view, FallbackBudget(1), apply, lambda outcome: None, lambda: ()))
    stack.push_async_callback(link.close)
    return Host(process, link)


@pytest.mark.skipif(not found(), reason=WHY_SKIPPED)
async def test_a_host_is_one_member_with_a_share_for_each_worker(
    server: RedisServer, tmp_path: Path
) -> None:
    policies = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for policy in policies:
        policy.write_text("policy_version: 1\npolicy: always_local\n")
    async with AsyncExitStack() as stack:
        one, other = [
            await started(
                stack,
                policy={"file": policy},
                state={
                    "redis": server.url(),
                    "interval_s": 0.02,
                    "timeout_s": 1.0,
                    "share_policy": True,
                },
            )
            for policy in policies
        ]

        async def together() -> bool:
            await one.tell(claims={"acme": 3}, sent={ENGINE: Load(7, 1)})
            heard = await other.tell()
            shares = sum(member.processes for member in heard.members)
            theirs = [member for member in heard.members if member.claims == {"acme": 3}]
            return shares == 3 and [member.sent for member in theirs] == [{ENGINE: Load(7, 1)}]

        await eventually(together, within_s=LONG_S)
        sync = one.process.sync
        assert sync is not None
        await eventually(lambda: sync.shares == 4, within_s=LONG_S)  # it hears by itself

        policies[0].write_text("policy_version: 1\npolicy: always_remote\n")
        copy = other.process.copies["active"]
        await one.process.copies["active"].look()
        await eventually(lambda: "always_remote" in copy._copy.read_text(), within_s=LONG_S)

        await server.stop()

        async def alone() -> bool:
            heard = await one.tell()
            return heard.alone and sum(member.processes for member in heard.members) >= 3

        await eventually(alone, within_s=LONG_S)
        await server.start()

        async def heard_again() -> bool:
            return not (await one.tell()).alone

        await eventually(heard_again, within_s=LONG_S)


def test_what_is_wrong_is_said_at_the_start(tmp_path: Path) -> None:
    def made(**fields: Any) -> StateProcess:
        settings = gateway_settings(d_watch=None, peers=(), **fields)
        return StateProcess(place_at(tmp_path), settings, make_policy, SYSTEM_CLOCK)

    with pytest.raises(ConfigError, match=r"gateway\.state\.share_policy: with workers"):
        made(state={"redis": "redis://127.0.0.1:1", "share_policy": True})
    bad = tmp_path / "bad.yaml"
    bad.write_text("nothing")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        made(policy={"file": bad})
    with pytest.raises(ConfigError, match="there must be at least one"):
        made(engines=())


ONE = 'engines: [{name: d-0, url: "http://127.0.0.1:9"}]\n'
TWO = """engines:
  - {name: d-0, url: "http://127.0.0.1:9"}
  - {name: d-1, url: "http://127.0.0.1:10"}
"""


@pytest.mark.parametrize(
    "bad", ["engines: [", "engines: []", ONE + 'peers: [{peer: p, instance: "0"}]', None]
)
async def test_a_state_that_starts_again_has_the_engines_that_were_good_last(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bad: str | None,
) -> None:
    monkeypatch.setattr(following, "LOOK_S", 0.01)
    file = tmp_path / "members"
    file.write_text(ONE)
    settings = gateway_settings(
        engines=(), peers=(), discovery={"file": file, "engines": (), "peers": ()}
    )

    def made() -> StateProcess:
        return StateProcess(place_at(tmp_path), settings, make_policy, SYSTEM_CLOCK)

    def names(process: StateProcess) -> list[str]:
        return [engine.name for engine in process.watching.members.engines]

    async with made().running() as process:
        assert names(process) == ["d-0"]
        file.write_text(TWO)
        await eventually(lambda: "d-1" in members_copy(tmp_path).read_text(), within_s=LONG_S)
    if bad is None:
        file.unlink()
    else:
        file.write_text(bad)
    async with made().running() as process:
        assert names(process) == ["d-0", "d-1"]
        assert "engines and peers stay as they are" in caplog.text
        assert 'result="refused"' in process.metrics.render().decode()
        file.write_text(ONE)
        await eventually(lambda: names(process) == ["d-0"], within_s=LONG_S)


def test_a_file_of_engines_that_never_was_good_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "members"
    file.write_text("engines: [")
    with pytest.raises(ConfigError, match="members is not YAML"):
        StateProcess(
            place_at(tmp_path),
            gateway_settings(engines=(), discovery={"file": file}),
            make_policy,
            SYSTEM_CLOCK,
        )
