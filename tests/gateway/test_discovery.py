"""A file and DNS names are followed; what fails or cannot be leaves everything as it was."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import prfaas.following
from gateway.app import check_settings
from gateway.discovery import Discovery
from gateway.members import Members
from prfaas.errors import ConfigError
from prfaas.limits import Limits
from prfaas.testing.dns_server import dns_server
from prfaas.testing.gateway_setup import gateway_settings
from prfaas.testing.waiting import eventually

NAME = "engines.test"


@dataclass
class Told:
    """Everything that a Discovery does."""

    applied: list[Members] = field(default_factory=list)
    changes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    found: dict[str, Members] = field(default_factory=dict)
    refuses: bool = False

    async def apply(self, members: Members) -> None:
        if self.refuses:
            raise ConfigError("not these")
        self.applied.append(members)

    @property
    def engines(self) -> list[str]:
        return [each.name for each in self.applied[-1].engines] if self.applied else []

    def discovery_changed(self, source: str, result: str) -> None:
        self.changes[result] += 1

    def discovery_failed(self, source: str) -> None:
        self.failures[source] += 1

    def discovery_found(self, source: str, members: Members) -> None:
        self.found[source] = members


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prfaas.following, "LOOK_S", 0.01)


def write(file: Path, *names: str, **fields: Any) -> None:
    """As it should be written: beside it, then moved over it."""
    engines = [{"name": name, "url": "http://127.0.0.1:1"} for name in names]
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"engines": engines, **fields}))
    fresh.rename(file)


@asynccontextmanager
async def following(told: Told, listed: Any = (), **found: Any) -> AsyncIterator[Discovery]:
    settings = gateway_settings(engines=listed, peers=(), discovery=found).gateway
    made = Discovery(settings, Limits(control_timeout_s=0.3), told.apply, told)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_engines_come_and_go_with_the_file(tmp_path: Path) -> None:
    file, told = tmp_path / "members.yaml", Told()
    write(file, "a")
    listed = [{"name": "always", "url": "http://127.0.0.1:1"}]
    async with following(told, listed, file=str(file)) as made:
        assert [each.name for each in made.members.engines] == ["always", "a"]
        write(file, "a", "b")
        await eventually(lambda: told.engines == ["always", "a", "b"])
        write(file, "b")
        await eventually(lambda: told.engines == ["always", "b"])
        await eventually(lambda: told.changes["applied"] == 2)
        assert [each.name for each in told.found[str(file)].engines] == ["b"]
        assert made.follows


@pytest.mark.parametrize(
    "bad",
    ["", "engines: [", "engines: [{name: x}]", "engines: [{name: a, url: u}, {name: a, url: u}]"],
)
async def test_a_file_that_is_no_good_changes_nothing(tmp_path: Path, bad: str) -> None:
    file, told = tmp_path / "members.yaml", Told()
    write(file, "a")
    async with following(told, file=str(file)) as made:
        file.write_text(bad)
        await eventually(lambda: told.changes["refused"] == 1)
        assert [each.name for each in made.members.engines] == ["a"]
        assert not told.applied
        write(file, "a", "b")
        await eventually(lambda: told.engines == ["a", "b"])


async def test_a_file_that_would_leave_no_engine_is_refused(tmp_path: Path) -> None:
    file, told = tmp_path / "members.yaml", Told()
    write(file, "a")
    async with following(told, file=str(file)) as made:
        write(file)
        await eventually(lambda: told.changes["refused"] == 1)
        file.unlink()
        await eventually(lambda: told.changes["refused"] == 2)
        assert [each.name for each in made.members.engines] == ["a"]


async def test_what_cannot_be_applied_leaves_what_was(tmp_path: Path) -> None:
    file, told = tmp_path / "members.yaml", Told(refuses=True)
    write(file, "a")
    async with following(told, file=str(file)) as made:
        write(file, "b")
        await eventually(lambda: told.changes["refused"] == 1)
        assert [each.name for each in made.members.engines] == ["a"]


async def test_peers_come_only_where_transfers_can_be_signed(tmp_path: Path) -> None:
    file, told = tmp_path / "members.yaml", Told()
    write(file, "a")
    peers = [{"peer": "p", "instance": "0", "watch": "127.0.0.1:1"}]
    settings = gateway_settings(
        engines=(), peers=(), transfer_key="", discovery={"file": str(file)}
    )
    check_settings(settings)
    made = Discovery(settings.gateway, Limits(), told.apply, told)
    task = asyncio.create_task(made.run())
    try:
        write(file, "a", "b", peers=peers)
        await eventually(lambda: told.changes["refused"] == 1)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not told.applied
    with pytest.raises(ConfigError, match="transfer_key"):
        check_settings(settings)


async def test_the_start_wants_a_good_file(tmp_path: Path) -> None:
    settings = gateway_settings(discovery={"file": str(tmp_path / "none.yaml")}).gateway
    told = Told()
    with pytest.raises(ConfigError, match="cannot read"):
        Discovery(settings, Limits(), told.apply, told)


async def test_a_name_is_asked_again_and_keeps_its_set_while_it_fails() -> None:
    told = Told()
    async with dns_server({(NAME, "A"): ["10.0.0.1"]}) as server:
        server.ttl_s = 0
        found = {"engines": ({"name": NAME},), "dns_server": server.address}
        async with following(told, **found):
            await eventually(lambda: told.engines == ["engines-10.0.0.1"])
            server.records[NAME, "A"] = ["10.0.0.1", "10.0.0.2"]
            await eventually(lambda: told.engines == ["engines-10.0.0.1", "engines-10.0.0.2"])
            server.rcode = "SERVFAIL"
            server.ttl_s = 0
            await eventually(lambda: told.failures[NAME] >= 1, within_s=20)
            assert told.engines == ["engines-10.0.0.1", "engines-10.0.0.2"]
    assert told.changes == {"applied": 2}


async def test_names_ask_no_more_than_the_interval_and_the_ttl_allow() -> None:
    told = Told()
    async with dns_server({(NAME, "A"): ["10.0.0.1"]}) as server:
        server.ttl_s = 300
        found = {
            "engines": ({"name": NAME},), "dns_server": server.address, "interval_s": 300,
        }  # fmt: skip
        async with following(told, **found):
            await eventually(lambda: told.engines == ["engines-10.0.0.1"])
            await asyncio.sleep(0.2)
            assert server.asked == 2  # A and AAAA, once


async def test_two_names_that_contradict_each_other_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told()
    records = {(NAME, "A"): ["10.0.0.1"], ("engines.other", "A"): ["10.0.0.1"]}
    async with dns_server(records) as server:
        server.ttl_s = 0
        names = ({"name": NAME}, {"name": "engines.other"})
        async with following(told, dns_server=server.address) as nothing:
            assert not nothing.follows
        settings = gateway_settings(
            engines=(), peers=(), discovery={"engines": names, "dns_server": server.address}
        ).gateway
        made = Discovery(settings, Limits(), told.apply, told)
        task = asyncio.create_task(made.run())
        try:
            await eventually(lambda: server.asked >= 12)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert told.changes == {"applied": 1, "refused": 1}
    assert sum("stay as they are" in record.message for record in caplog.records) == 1
