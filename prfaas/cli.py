"""The command `prfaas`: the composition root, which imports each part only when it runs it."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import click
from pydantic import ValidationError

from prfaas.cli_group import CommandGroup
from prfaas.cli_planning import COMMANDS
from prfaas.cli_tenants import tenants_group
from prfaas.errors import ConfigError, PrfaasError
from prfaas.logs import start_logging
from prfaas.settings import Settings, StateSettings, load_settings, validation_message

_FILE = click.Path(dir_okay=False, path_type=Path)
_PATH = click.Path(path_type=Path)
_PORT = click.IntRange(0, 65535)


Command = Callable[..., None]


def _serving(command: Command) -> Command:
    """The options of every process that serves."""
    for option in (
        click.option("--ready-fd", type=int, hidden=True),
        click.option("--port", type=_PORT, help="Listen port; 0 picks one."),
        click.option("--host", help="Listen address."),
        click.option("--config", type=_FILE, help="YAML file; see docs/configuration.md."),
    ):
        command = option(command)
    return command


def _beside_an_engine(command: Command) -> Command:
    """The options of an agent."""
    for option in (
        click.option("--kv-events", help="ZMQ endpoint of vLLM's KV events."),
        click.option("--engine-url", help="Base URL of vLLM's OpenAI server."),
        click.option("--engine", type=click.Choice(["embedded", "vllm"]), help="Engine beside it."),
        click.option("--socket", type=_PATH, help="KvPort unix socket it listens on."),
    ):
        command = option(command)
    return command


@click.group(cls=CommandGroup)
@click.version_option(package_name="prfaas")
def cli() -> None:
    """Cross-cluster Prefill-as-a-Service for LLM serving."""


@cli.command()
@_serving
@click.option("--no-offload", is_flag=True, help="Everything stays local.")
@click.option("--workers", type=click.IntRange(1, 64), help="Processes that share the port.")
def gateway(
    config: Path | None,
    host: str | None,
    port: int | None,
    ready_fd: int | None,
    no_offload: bool,
    workers: int | None,
) -> None:
    """Run the gateway: the OpenAI API in front of the decode engines."""
    offload = False if no_offload else None
    settings = _settings(config, "gateway", host=host, port=port, offload=offload, workers=workers)
    start_logging(settings.log_format)
    if settings.gateway.workers > 1:
        _run_workers(settings, _ready(ready_fd))
        return
    from gateway.app import serve
    from policies.effective import effective
    from policies.registry import make_policy

    policy = make_policy(settings.gateway.policy)
    _run(
        serve(
            settings,
            _ready(ready_fd),
            policy=policy,
            make_policy=make_policy,
            effective=effective,
        )
    )


@cli.command()
@_serving
@click.option("--model", type=_PATH, help="Hugging Face directory or GGUF file.")
@click.option("--served-model-name", help="Name in the API; default: the directory's name.")
@click.option("--device", help="torch device, for example cpu or cuda:0.")
@click.option("--threads", type=click.IntRange(0), help="torch threads; 0: torch's default.")
@click.option("--port-socket", type=_PATH, help="KvPort unix socket of the agent beside it.")
@click.option("--paced", type=_FILE, help="Profile whose step times replace computing.")
def engine(
    config: Path | None,
    host: str | None,
    port: int | None,
    ready_fd: int | None,
    **options: Any,
) -> None:
    """Run the embedded torch engine and its OpenAI server."""
    settings = _settings(config, "engine", host=host, port=port, **options)
    if settings.engine.model is None and settings.engine.paced is None:
        raise ConfigError("engine.model: name a Hugging Face directory or a GGUF file (--model)")
    _need_engine()
    from local_engine.serve import serve

    _run(serve(settings, _ready(ready_fd)))


@cli.command()
@_serving
@_beside_an_engine
def agent(
    config: Path | None,
    host: str | None,
    port: int | None,
    ready_fd: int | None,
    **options: Any,
) -> None:
    """Run the agent beside a decode engine."""
    from remote_prefill.process_tuning import tune_process

    tune_process()
    from remote_prefill.agent_main import serve

    settings = _settings(config, "agent", host=host, port=port, **_vllm_options(options))
    start_logging(settings.log_format)
    _run(serve(settings, _ready(ready_fd)))


@cli.command()
@_serving
@_beside_an_engine
def prefill(
    config: Path | None,
    host: str | None,
    port: int | None,
    ready_fd: int | None,
    **options: Any,
) -> None:
    """Run the remote prefill service: the agent beside a prefill engine."""
    from remote_prefill.process_tuning import tune_process

    tune_process()
    from remote_prefill.prefill_main import serve

    settings = _settings(config, "prefill", host=host, port=port, **_vllm_options(options))
    start_logging(settings.log_format)
    _run(serve(settings, _ready(ready_fd)))


@cli.command()
@click.option("--config", type=_FILE, help="YAML file whose settings replace the demo's defaults.")
@click.option("--model", type=_PATH, help="Hugging Face directory or GGUF; default: SmolLM2-135M.")
@click.option("--port", type=_PORT, help="Gateway port; default: 8000, with --once a free one.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Per engine.")
@click.option("--pin/--no-pin", default=True, show_default=True, help="One core for each engine.")
@click.option("--once", is_flag=True, help="Show it and exit; non-zero if anything is off.")
@click.option("--tls", is_flag=True, help="Mutual TLS between gateway and agents.")
@click.option("--fleet", type=_FILE, help="Run the fleet of this file instead (docs/fleet.md).")
def up(
    config: Path | None,
    model: Path | None,
    port: int | None,
    threads: int,
    pin: bool,
    once: bool,
    tls: bool,
    fleet: Path | None,
) -> None:
    """Run everything on this machine and show both paths of a request."""
    _need_engine()
    if fleet is not None:
        if config or model or tls:
            raise click.UsageError("--fleet has its settings in its file: only --port and --once")
        from prfaas.up.fleet_run import FleetOptions, run_fleet

        sys.exit(run_fleet(FleetOptions(fleet, port, once)))
    from prfaas.up.main import UpOptions, run_up

    sys.exit(run_up(UpOptions(load_settings(config), model, port, threads, pin, once, tls)))


@cli.command()
@click.option("--out", type=_PATH, required=True, help="Directory of the CA and the pairs.")
@click.option("--name", "names", multiple=True, help="Make NAME/cert.pem and key.pem; repeatable.")
@click.option("--days", type=click.IntRange(1), default=30, show_default=True, help="Validity.")
@click.option("--rotate", multiple=True, help="Replace the pair of this name; repeatable.")
def certs(out: Path, names: tuple[str, ...], days: int, rotate: tuple[str, ...]) -> None:
    """Make a CA and certificates for mutual TLS, for tests and pilots."""
    from prfaas.certs import describe, make_certs

    click.echo(describe(out, make_certs(out, names, days=days, rotate=rotate)))


@cli.command()
@click.argument("file", type=_FILE)
@click.option(
    "--part",
    "only",
    multiple=True,
    type=click.Choice(["gateway", "engine", "agent", "prefill"]),
    help="Check this section; repeatable; default: all that FILE has.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds for each dial.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def check(file: Path, only: tuple[Any, ...], timeout: float, as_json: bool) -> None:
    """Check FILE and dial all that it names: what is wrong, and how to mend it.

    Status 1 if something is.
    """
    from gateway.app import check_settings
    from policies.registry import make_policy
    from prfaas.check.findings import Level
    from prfaas.check.gateway_part import Parts
    from prfaas.check.run import check as run_check

    parts = Parts(check_settings, make_policy, _reach_state)
    findings = _run(run_check(file, parts, timeout, only))
    click.echo(json.dumps(findings.to_json(), indent=2) if as_json else findings.to_text())
    sys.exit(1 if findings.count(Level.FAIL) else 0)


@cli.command("check-host")
@click.option("--rate", default="10G", show_default=True, help="Link in bits per second.")
@click.option(
    "--rtt",
    type=click.FloatRange(0, min_open=True),
    default=80,
    show_default=True,
    help="Milliseconds.",
)
@click.option(
    "--connections", type=click.IntRange(1), default=4, show_default=True, help="Data channels."
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def check_host(rate: str, rtt: float, connections: int, as_json: bool) -> None:
    """Name each host setting that is weak for KV over a WAN.

    Status 1 if there is one.
    """
    from prfaas import hostcheck

    link = hostcheck.Link(hostcheck.parse_rate(rate), rtt / 1e3, connections)
    report = hostcheck.Report(link, hostcheck.assess(hostcheck.read_host(), link))
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.to_text())
    sys.exit(1 if report.weak else 0)


@cli.command("calibrate-kv")
@click.option("--model", type=_PATH, required=True, help="Hugging Face directory or GGUF file.")
@click.option("--out", type=_FILE, required=True, help="File to write.")
@click.option("--text", type=_FILE, help="Text to learn from; default: Python's manual.")
@click.option(
    "--evaluation-text",
    type=_FILE,
    help="Text to measure on, of another source; default: sources of Python's library.",
)
@click.option("--model-identity", default="", help="What engines state; default: computed digest.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of torch.")
def calibrate_kv(
    model: Path,
    out: Path,
    text: Path | None,
    evaluation_text: Path | None,
    model_identity: str,
    threads: int,
) -> None:
    """Calibrate lossy KV codecs for a model, and measure what they do to its answers."""
    _need_engine()
    import torch

    from local_engine.kv_calibration.run import calibrate

    torch.set_num_threads(threads)
    calibrate(
        model,
        out,
        click.echo,
        learn_text=text,
        evaluation_text=evaluation_text,
        model_identity=model_identity,
    )


@cli.group("config")
def config_group() -> None:
    """Check configuration files."""


@config_group.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the configuration file."""
    click.echo(json.dumps(Settings.model_json_schema(), indent=2))


@config_group.command("check")
@click.argument("file", type=_FILE)
@click.option("--keys-only", is_flag=True, help="Not the files that it names.")
def config_check(file: Path, keys_only: bool) -> None:
    """Check FILE, with the environment applied, as a process would read it.

    The files that it names are opened too, and nothing is dialled (`prfaas check` does that).
    """
    settings = load_settings(file)
    if not keys_only:
        from gateway.app import check_settings
        from policies.registry import make_policy
        from prfaas.check.files import named_files

        if wrong := named_files(settings, make_policy, check_settings).failed():
            raise ConfigError("; ".join(f"{each.what}: {each.found}" for each in wrong))
    click.echo(f"{file}: ok")


for _command in (*COMMANDS, tenants_group):
    cli.add_command(_command)


def main() -> None:
    """Entry point: an error of ours is one line on stderr and a status, never a traceback."""
    try:
        cli.main(standalone_mode=True)
    except PrfaasError as exc:
        click.echo(f"prfaas: {' '.join(exc.message.split())}", err=True)
        sys.exit(2 if isinstance(exc, ConfigError) else 1)


def _settings(
    config: Path | None,
    section: Literal["gateway", "engine", "agent", "prefill"],
    **options: Any,
) -> Settings:
    """File and environment, then the options that were given. Raises ConfigError naming the key."""
    settings = load_settings(config)
    given = {name: value for name, value in options.items() if value is not None}
    current = getattr(settings, section)
    for name, value in given.items():
        if isinstance(value, dict):
            given[name] = {**dict(getattr(current, name)), **value}
    try:
        changed = type(current).model_validate({**dict(current), **given})
    except ValidationError as exc:
        raise ConfigError(validation_message(exc, prefix=section)) from exc
    return settings.model_copy(update={section: changed})


def _run_workers(settings: Settings, ready: Callable[[int], None]) -> None:
    """A supervisor that imports nothing heavy, and forks; the rest is its children's."""
    from gateway.workers.place import Place
    from gateway.workers.supervisor import Supervisor

    def state(place: Place) -> None:
        from gateway.workers.process import serve_state
        from policies.registry import make_policy

        _run(serve_state(place, settings, make_policy))

    def worker(place: Place) -> None:
        from gateway.workers.process import serve_worker
        from policies.effective import effective
        from policies.registry import make_policy

        _run(serve_worker(place, settings, make_policy, effective))

    Supervisor(settings, ready, state, worker).run()


async def _reach_state(settings: StateSettings) -> None:
    """Ask Redis to forget a gateway that never was. Raises ConfigError and StateUnavailable."""
    try:
        from gateway.state.redis_store import RedisStore
    except ImportError as exc:
        raise ConfigError("gateway.state.redis needs: pip install 'prfaas[redis]'") from exc
    store = RedisStore(settings)
    try:
        await store.leave("prfaas-check")
    finally:
        await store.close()


def _need_engine() -> None:
    """Raise ConfigError where the packages of the embedded engine are not installed."""
    if not (find_spec("torch") and find_spec("safetensors")):
        raise ConfigError("the embedded engine needs torch: pip install 'prfaas[engine]'")


def _vllm_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of an agent, with what concerns its vLLM where the settings have it."""
    names = {"engine_url": "url", "kv_events": "kv_events"}
    vllm = {names[key]: options.pop(key) for key in names if options.get(key) is not None}
    others = {key: value for key, value in options.items() if key not in names}
    return {**others, "vllm": vllm} if vllm else others


def _ready(ready_fd: int | None) -> Callable[[int], None]:
    """What a process calls once it serves: tells its port to whoever started it."""

    def ready(port: int) -> None:
        if ready_fd is not None:
            os.write(ready_fd, f"{port}\n".encode())
            os.close(ready_fd)

    return ready


def _run(main: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    try:
        return uvloop.run(main)
    finally:
        # At exit gRPC waits two seconds for TLS channels that reference cycles keep alive.
        gc.collect()
