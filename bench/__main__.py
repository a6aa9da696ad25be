"""`python -m bench NAME [--quick]`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import click

from prfaas.errors import PrfaasError


def names() -> list[str]:
    """Benchmarks there are: the modules beside this one with a `run(quick)`."""
    modules = Path(__file__).parent.glob("*.py")
    return sorted(p.stem for p in modules if "\ndef run(quick: bool)" in p.read_text())


@click.command(epilog=f"Benchmarks: {', '.join(names())}.")
@click.argument("name")
@click.option("--quick", is_flag=True, help="Fewer points and rounds, within 5 minutes.")
def main(name: str, quick: bool) -> None:
    """Run benchmark NAME, print its table and write bench/results/NAME.json."""
    if name not in names():
        raise click.UsageError(f"no benchmark {name!r}; there are: {', '.join(names())}")
    # Benchmarks with gRPC start processes; with its fork handlers one in a hundred dies at once.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        importlib.import_module(f"bench.{name}").run(quick)
    except PrfaasError as exc:
        click.echo(f"bench {name}: {exc.message}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
