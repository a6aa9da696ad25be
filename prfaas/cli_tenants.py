"""The commands `prfaas tenants`: make and change the file of tenants that gateways read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import ValidationError

from prfaas.cli_group import CommandGroup
from prfaas.errors import ConfigError
from prfaas.settings import QualityName, validation_message
from prfaas.tenants import (
    EVERY_PEER,
    Tenant,
    TenantFile,
    edit_tenants,
    load_tenants,
    new_key,
    rotated,
)

Command = Callable[..., None]
_QUALITIES = get_args(QualityName)


def _of_a_file(command: Command) -> Command:
    return click.option(
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        required=True,
        help="File of tenants; gateway.tenants.file names it.",
    )(command)


def _bounds(command: Command) -> Command:
    """The options that say what a tenant may."""
    number = click.FloatRange(0, min_open=True)
    for option in (
        click.option("--admin/--no-admin", default=None, help="May read /prfaas/."),
        click.option("--no-peers", is_flag=True, help="Its prompts stay in this cluster."),
        click.option("--peer", "peers", multiple=True, help="Prompts may go there; repeatable."),
        click.option("--kv-quality", type=click.Choice(_QUALITIES), help="Worst class of KV."),
        click.option("--weight", type=number, help="Share among those who wait."),
        click.option("--priority", type=click.IntRange(0, 9), help="The higher go first."),
        click.option("--concurrent-requests", type=click.IntRange(1), help="In flight at once."),
        click.option("--tokens-per-day", type=number, help="Prompts and answers."),
        click.option("--tokens-per-minute", type=number, help="Prompts and answers."),
        click.option("--requests-per-minute", type=number, help="Requests let in."),
    ):
        command = option(command)
    return command


@click.group("tenants", cls=CommandGroup)
def tenants_group() -> None:
    """Make and change the file of tenants; gateways read it again by themselves."""


@tenants_group.command("add")
@click.argument("name")
@_of_a_file
@_bounds
def add(name: str, file: Path, **bounds: Any) -> None:
    """Add the tenant NAME and print its key, which is shown only now."""
    key, made = new_key()

    def change(tenants: TenantFile) -> TenantFile:
        if any(tenant.name == name for tenant in tenants.tenants):
            raise ConfigError(f"there is a tenant {name!r} already", field="tenants")
        return tenants.with_tenant(_tenant({"name": name, "keys": (made,)}, bounds))

    edit_tenants(file, change)
    click.echo(key)


@tenants_group.command("change")
@click.argument("name")
@_of_a_file
@_bounds
def change(name: str, file: Path, **bounds: Any) -> None:
    """Change what the tenant NAME may; what is not named stays."""
    edit_tenants(
        file,
        lambda tenants: tenants.with_tenant(_tenant(dict(iter(tenants.tenant(name))), bounds)),
    )


@tenants_group.command("rotate")
@click.argument("name")
@_of_a_file
@click.option(
    "--grace-hours",
    type=click.FloatRange(0),
    default=24.0,
    show_default=True,
    help="The old keys are good for so long.",
)
def rotate(name: str, file: Path, grace_hours: float) -> None:
    """Print a new key of the tenant NAME; its old ones expire."""
    keys: list[str] = []

    def change(tenants: TenantFile) -> TenantFile:
        key, tenant = rotated(tenants.tenant(name), timedelta(hours=grace_hours))
        keys.append(key)
        return tenants.with_tenant(tenant)

    edit_tenants(file, change)
    click.echo(keys[-1])


@tenants_group.command("revoke")
@click.argument("name")
@click.argument("key_id")
@_of_a_file
def revoke(name: str, key_id: str, file: Path) -> None:
    """Refuse the key KEY_ID of the tenant NAME from now on."""

    def change(tenants: TenantFile) -> TenantFile:
        tenant = tenants.tenant(name)
        kept = tuple(key for key in tenant.keys if key.id != key_id)
        if len(kept) == len(tenant.keys):
            raise ConfigError(f"tenant {name!r} has no key {key_id!r}", field="tenants")
        return tenants.with_tenant(tenant.model_copy(update={"keys": kept}))

    edit_tenants(file, change)


@tenants_group.command("remove")
@click.argument("name")
@_of_a_file
def remove(name: str, file: Path) -> None:
    """Remove the tenant NAME and all its keys."""
    edit_tenants(file, lambda tenants: tenants.without(name))


@tenants_group.command("list")
@_of_a_file
def list_tenants(file: Path) -> None:
    """Show tenants, what they may, and the ids of their keys."""
    now = datetime.now(UTC)
    for tenant in load_tenants(file).tenants:
        told = tenant.model_dump(mode="json", exclude_defaults=True, exclude={"name", "keys"})
        click.echo(" ".join([tenant.name, *(f"{name}={value}" for name, value in told.items())]))
        for key in tenant.keys:
            if key.expires is None:
                state = "good"
            else:
                word = "expired" if key.expires <= now else "good until"
                state = f"{word} {key.expires.isoformat(timespec='seconds')}"
            click.echo(f"  key {key.id} {state}")


def _tenant(fields: dict[str, Any], bounds: dict[str, Any]) -> Tenant:
    """With what was named on the command line. Raises ConfigError."""
    peers, no_peers = bounds.pop("peers"), bounds.pop("no_peers")
    if peers and no_peers:
        raise ConfigError("--peer and --no-peers exclude each other", field="peers")
    named = {name: value for name, value in bounds.items() if value is not None}
    if peers or no_peers:
        named["peers"] = (EVERY_PEER,) if EVERY_PEER in peers else tuple(peers)
    try:
        return Tenant.model_validate({**fields, **named})
    except ValidationError as exc:
        raise ConfigError(validation_message(exc, prefix="tenants")) from None
