"""Lanes and control streams of P's service: lost ones, resumed ones, credit."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.errors import SessionLost
from prfaas.frames import FrameType
from prfaas.receive_session import ReceiveState
from prfaas.testing.scripted_port import PrefillScript


async def test_a_session_goes_on_over_another_control_stream(
    prefill_site: Any, tokens: Any
) -> None:
    site = await prefill_site(engine={"script": PrefillScript(stop_before=(1, 1))})
    client = await site.client(tokens(20)).open()
    await client.until(FrameType.KV)
    client.call.cancel()
    assert await client.step() is False or await client.step() is False
    await client.resume()
    site.engine.script.go.set()
    await client.rest()
    assert client.machine.state is ReceiveState.COMPLETE
    assert client.staged_is_right(site.engine)
    assert client.machine.duplicates == 0
    await site.clean()


async def test_what_was_on_a_lost_lane_comes_again_on_another(
    prefill_site: Any, tokens: Any
) -> None:
    site = await prefill_site(engine={"script": PrefillScript(layer_s=0.002)})
    client = site.client(tokens(20))
    await client.attach(0)
    lost = client.lane
    lost.cancel()
    client._readers.pop().cancel()
    await client.open()
    book = (1,), 2
    client.lane.cancel()
    client._readers[0].cancel()
    await client.attach(1)
    while client.machine.state is not ReceiveState.COMPLETE:
        await client.call.write(client.machine.ack(0.0, *book).serialize())
        assert await client.step()
    assert client.staged_is_right(site.engine)
    await site.clean()


async def test_resuming_what_is_not_there_says_that_it_is_lost(
    prefill_site: Any, tokens: Any
) -> None:
    site = await prefill_site()
    client = site.client(tokens(9))
    await client.resume()
    with pytest.raises(SessionLost, match="is not open here"):
        await client.step()
    other = site.client(tokens(9), link=b"unknown")
    await other.resume()
    with pytest.raises(SessionLost) as caught:
        await other.step()
    assert caught.value.field == "link"


async def test_credit_is_never_exceeded_and_zero_means_wait(prefill_site: Any, tokens: Any) -> None:
    site = await prefill_site()
    client = await site.client(tokens(40), credit_bytes=0).open()
    await client.until(FrameType.ACCEPT)
    await client.until(FrameType.SEAL)
    (served,) = site.agent.sessions.values()
    assert (served.machine.outstanding_bytes, served.machine.starved) == (0, True)
    while client.machine.state is not ReceiveState.COMPLETE:
        client.machine.grant(700)
        await client.ack()
        assert served.machine.outstanding_bytes <= 700
        assert await client.step()
    assert client.staged_is_right(site.engine)
    await site.clean()
