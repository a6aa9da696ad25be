"""`python -m bench.wanlink`: bring a link up, run commands over it, or measure what it gives."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from bench.wanlink import namespaces
from bench.wanlink.link import WanLink, available
from bench.wanlink.shape import SIDES, LinkStats, Side, parse_rate, parse_share
from bench.wanlink.tcp import TcpSettings


def _parsed(parse: Callable[[str], float]) -> Callable[..., float]:
    """An option's callback that reads its text with one of our parsers."""

    def read(_ctx: click.Context, _param: click.Parameter, text: str) -> float:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return read


def _link_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command a `link` made of the options that all of them share."""

    @click.option("--rate", callback=_parsed(parse_rate), required=True, help="300M, 1G")
    @click.option("--rtt", "rtt_ms", type=float, required=True, help="round trip in ms")
    @click.option("--queue", "queue_bytes", type=int, help="bytes each way [one BDP, min 256 KiB]")
    @click.option("--loss", callback=_parsed(parse_share), default="0", help="0.1% or 0.001")
    @click.option("--seed", type=int, default=0, help="of the losses")
    @click.option("--mtu", type=int, default=1500)
    @click.option("--cpu", type=int, help="pin the emulator to this CPU")
    @click.option("--realtime/--no-realtime", default=True, help="emulator before all others")
    @click.option("--congestion", help="congestion control on both sides, as bbr or cubic")
    @click.option("--initcwnd", type=int, help="initial window in packets")
    @click.option("--buffer-max", type=int, help="largest TCP buffer in bytes, both ways")
    @wraps(command)
    def with_link(
        rate: float,
        rtt_ms: float,
        queue_bytes: int | None,
        loss: float,
        seed: int,
        mtu: int,
        cpu: int | None,
        realtime: bool,
        congestion: str | None,
        initcwnd: int | None,
        buffer_max: int | None,
        **rest: Any,
    ) -> None:
        reason = available()
        if reason is not None:
            raise click.ClickException(reason)
        buffers = None if buffer_max is None else (4096, min(buffer_max, 131072), buffer_max)
        try:
            link = WanLink(
                rate,
                rtt_ms,
                queue_bytes,
                loss,
                seed=seed,
                mtu=mtu,
                cpu=cpu,
                realtime=realtime,
                tcp_settings=TcpSettings(
                    congestion_control=congestion, initcwnd=initcwnd, wmem=buffers, rmem=buffers
                ),
            )
            with link:
                command(link=link, **rest)
        except (ValueError, OSError) as error:
            raise click.ClickException(str(error)) from error

    return with_link


@click.group()
def main() -> None:
    """A WAN link between two network namespaces of this machine; needs root."""


@main.command()
@_link_options
@click.option("--seconds", type=float, default=2.0, help="of each arrangement, after a warm-up")
@click.option("--connections", default="1,4", help="arrangements, separated by commas")
def measure(link: WanLink, seconds: float, connections: str) -> None:
    """What real TCP gets out of the link."""
    counts = tuple(int(count) for count in connections.split(","))
    click.echo(link)
    click.echo(link.measure(seconds, counts))


@main.command()
@_link_options
def up(link: WanLink) -> None:
    """Keep the link up; lines on standard input change it, the end of it ends the link.

    A line is `key=value ...` of rate, rtt, queue, loss, way, blackhole, stall (on, off) and drop
    (ms), or `stats`.
    """
    click.echo(link)
    for side in SIDES:
        click.echo(f"{side}: {link.address(side)}  ip netns exec {link.namespace(side)} COMMAND")
    for line in sys.stdin:
        try:
            click.echo(_obey(link, line.split()))
        except ValueError as error:
            click.echo(f"not understood: {error}", err=True)


@main.command(context_settings={"ignore_unknown_options": True})
@_link_options
@click.option("--peer", help="a command to run on side b meanwhile, as a shell would split it")
@click.argument("argv", nargs=-1, required=True)
def run(link: WanLink, peer: str | None, argv: tuple[str, ...]) -> None:
    """Run a command on side a; both find the addresses in WANLINK_A and WANLINK_B."""
    env = {**os.environ, "WANLINK_A": link.address("a"), "WANLINK_B": link.address("b")}
    if peer is not None:
        link.run_in("b", shlex.split(peer), env, stdin=subprocess.DEVNULL)
    status = link.run_in("a", list(argv), env, stdin=None).wait()
    click.echo(_table(link.stats()), err=True)
    if status:
        raise SystemExit(status)


@main.command()
def clean() -> None:
    """Remove the namespaces of owners that are dead."""
    for name in namespaces.remove_leftovers():
        click.echo(f"removed {name}")


_SWITCH = {"on": True, "off": False}


def _obey(link: WanLink, words: list[str]) -> str:
    """Apply one line; the counters after it. ValueError for what it does not understand."""
    change: dict[str, Any] = {}
    drop_ms: float | None = None
    for word in words:
        key, _, value = word.partition("=")
        match key:
            case "rate":
                change["rate_bits"] = parse_rate(value)
            case "rtt":
                change["rtt_ms"] = float(value)
            case "queue":
                change["queue_bytes"] = int(value)
            case "loss":
                change["loss"] = parse_share(value)
            case "blackhole" | "stall" if value in _SWITCH:
                change[key] = _SWITCH[value]
            case "way":
                change["way"] = value
            case "drop":
                drop_ms = float(value)
            case "stats":
                pass
            case _:
                raise ValueError(word)
    if drop_ms is not None:
        link.drop_for(drop_ms, change.get("way"))
    return _table(link.set(**change))


def _table(stats: LinkStats) -> str:
    ways: tuple[tuple[Side, Any], ...] = (("a", stats.ab), ("b", stats.ba))
    return "\n".join(
        f"from {side}: {way.packets} packets, {way.wire_bytes} wire bytes, "
        f"dropped {way.queue_drops} queue, {way.losses} loss, {way.blackholed} blackhole, "
        f"{way.device_drops} before the link; queue {way.queue_bytes} now, "
        f"{way.queue_peak_bytes} at most"
        for side, way in ways
    )


if __name__ == "__main__":
    main()
