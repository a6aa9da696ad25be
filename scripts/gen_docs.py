"""Writes the generated pages (configuration, errors, commands) and the tables in the READMEs.

`python -m scripts.gen_docs` writes; with `--check` it only says what is stale, with status 1.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from policies.scenario import Scenario
from prfaas.cli import cli
from prfaas.errors import BY_KIND
from prfaas.limits import Limits
from prfaas.settings import Settings
from scripts.metrics_page import metrics_page

ROOT = Path(__file__).parent.parent
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

_HEAD = """\
# Configuration

This page is generated from the settings' own descriptions (`make docs`).

One YAML file and the environment configure every process; each reads the sections it needs, so all
processes of a site can share one file. A key is the path to its value: `gateway.port` is

```yaml
config_version: 1
gateway:
  port: 9000
```

or, in the environment, `PRFAAS_GATEWAY__PORT=9000`. Command-line options win over the environment,
which wins over the file, which wins over the defaults below. Unknown keys, wrong types and values
out of range are errors that name the key. `prfaas config check FILE` checks a file and those that
it names (policies, tenants, certificates, tokenizers, profiles, what is discovered), and
`prfaas config schema` prints a JSON Schema that editors understand.
"""

_SCENARIOS_HEAD = """\
# Scenarios

This page is generated (`make docs`). A scenario is a YAML file with the sites, links, prices,
objectives and workload that `prfaas plan`, `simulate` and `tune` are asked about; `prfaas workload
--scenario` describes what it generates, and `prfaas calibrate` writes one of a live fleet. This one
has two clusters of the paper's chips over 10 Gbit/s, and conversations that come in bursts:

```yaml
name: two-clusters
local: {prefill: paper-h20, instances: 8, cache_tokens: 4000000}
peers:
  - name: fra
    profile: paper-h200
    instances: 4
    cache_tokens: 4000000
    link: {gbit_per_s: 10.0, rtt_ms: 20.0}
objectives: {ttft_p90_s: 10.0, ttft_p99_s: 20.0}
prices: {local_instance_per_hour: 16.0, remote_instance_per_hour: 24.0, egress_per_gb: 0.02}
workload:
  kind: sessions
  requests: 3000
  arrivals: {kind: bursty, rate_per_s: 0.8}
  sessions: {turns: 4.0, system_tokens: 2048}
  output_tokens: 300
```

Profiles are named as `prfaas profile list` does, or are files beside this one
([policies.md](policies.md) says what is in them). Unknown keys, keys without their unit and values
out of range are errors that name the key.
"""

_ERRORS_HEAD = """\
# Errors

This page is generated (`make docs`). Every error of prfaas has a kind, which is the same over HTTP
and gRPC and comes out at the other end as the class that went in (`prfaas/errors.py`). Over HTTP it
has OpenAI's shape: the kind is `error.type` and `error.code`, and `error.param` names the field
where one is to blame. Kinds with 503 come with Retry-After where a time is known.

"""

_COMMANDS_HEAD = """\
# Commands

This page is generated (`make docs`). A wrong setting or option is one line on stderr and status 2;
any other error of ours is one line and status 1.
"""


def configuration_page() -> str:
    """All of docs/configuration.md."""
    parts = [_HEAD]
    rows = ["| key | default | what it is |", "| --- | --- | --- |"]
    for name, info in Settings.model_fields.items():
        section = info.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            rows.append(f"| `{name}` | `{info.default}` | {_cell(info.description)} |")
    parts.append("\n".join(rows) + "\n")
    for name, info in Settings.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            parts.append(f"## `{name}`\n\n{_cell(info.description)}\n\n{_table(section, name)}")
    parts.append(_nested())
    return "\n".join(parts)


def scenarios_page() -> str:
    """All of docs/scenarios.md."""
    rows = _table(Scenario, "").replace("| `.", "| `")
    return f"{_SCENARIOS_HEAD}\n## A scenario\n\n{rows}\n{_nested(Scenario)}"


def errors_page() -> str:
    """All of docs/errors.md."""
    rows = ["| kind | HTTP | gRPC | what it says |", "| --- | --- | --- | --- |"]
    for kind, cls in sorted(BY_KIND.items(), key=lambda item: (item[1].http_status, item[0])):
        meaning = _cell(cls.__doc__)
        rows.append(f"| `{kind}` | {cls.http_status} | `{cls.grpc_code}` | {meaning} |")
    return _ERRORS_HEAD + "\n".join(rows) + "\n"


def commands_page() -> str:
    """All of docs/commands.md: the help of every command."""
    parts = [_COMMANDS_HEAD]
    for path, command in _commands(cli, ("prfaas",)):
        # Click wraps to the terminal; the page must not depend on one.
        context = click.Context(command, info_name=" ".join(path), max_content_width=88)
        context.terminal_width = 88
        parts.append(f"## `{' '.join(path)}`\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def _commands(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _commands(command.commands[name], (*path, name))


def limits_table(header: str) -> str:
    """The table of every wait and queue, for the READMEs."""
    rows = [header, "| --- | --- | --- |"]
    for name, info in Limits.model_fields.items():
        rows.append(f"| `{name}` | {_readable(name, info.default)} | {_cell(info.description)} |")
    return "\n".join(rows) + "\n"


def fill(text: str, mark: str, content: str) -> str:
    """`text` with what stands between the marks replaced."""
    begin, end = f"<!-- {mark}:begin -->\n", f"<!-- {mark}:end -->"
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"no {begin.strip()} ... {end} in the page")
    return before + begin + content + end + after


def pages() -> dict[Path, str]:
    """What every page with generated text should hold now."""
    readme, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"
    return {
        ROOT / "docs" / "configuration.md": configuration_page(),
        ROOT / "docs" / "errors.md": errors_page(),
        ROOT / "docs" / "commands.md": commands_page(),
        ROOT / "docs" / "metrics.md": metrics_page(),
        ROOT / "docs" / "scenarios.md": scenarios_page(),
        readme: fill(readme.read_text(), "limits", limits_table("| limit | default | bounds |")),
        chinese: fill(chinese.read_text(), "limits", limits_table("| 限制 | 默认值 | 约束对象 |")),
    }


def stale_pages() -> list[Path]:
    """Pages that do not hold what they should."""
    return [
        page
        for page, content in pages().items()
        if not page.exists() or page.read_text() != content
    ]


def _table(section: type[BaseModel], path: str) -> str:
    rows = ["| key | type | default | what it is |", "| --- | --- | --- | --- |"]
    for name, info in _own_first(section):
        for key, field, default in _rows(f"{path}.{name}", info, info.default):
            cells = (f"`{key}`", _type(field), _default(key, default), _cell(field.description))
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _own_first(section: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """Fields of a section; what it has in common with others comes last."""
    own = inspect.get_annotations(section)
    return sorted(section.model_fields.items(), key=lambda field: field[0] not in own)


def _rows(key: str, info: FieldInfo, default: Any) -> Iterator[tuple[str, FieldInfo, Any]]:
    """A section inside a section shows its own keys, with the defaults that they have there."""
    inner = info.annotation
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        for name, field in inner.model_fields.items():
            there = getattr(default, name) if isinstance(default, BaseModel) else field.default
            yield from _rows(f"{key}.{name}", field, there)
    else:
        yield key, info, default


def _nested(whole: type[BaseModel] = Settings) -> str:
    """Sections that may be absent, and the entries of the lists; one table for each class."""
    found: dict[type[BaseModel], list[str]] = {}
    for model, path in _inner_models(whole, ""):
        found.setdefault(model, []).append(f"`{path}`")
    parts = [
        f"## Keys of {', '.join(paths)}\n\n{_cell(model.__doc__)}\n\n{_table(model, '')}"
        for model, paths in found.items()
    ]
    return "\n".join(parts).replace("| `.", "| `")


def _inner_models(model: type[BaseModel], path: str) -> Iterator[tuple[type[BaseModel], str]]:
    for name, info in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _inner_models(kind, here)
            continue
        inner = [arg for arg in get_args(kind) if isinstance(arg, type)]
        for found in (arg for arg in inner if issubclass(arg, BaseModel)):
            entry = f"{here}[]" if get_origin(kind) is tuple else here
            yield found, entry
            yield from _inner_models(found, entry)


def _type(info: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(bound, word)}"
        for bound in info.metadata
        for word, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if getattr(bound, word, None) is not None
    ]
    return " ".join([_type_name(info.annotation), ", ".join(bounds)]).strip()


def _type_name(kind: Any) -> str:
    names: dict[Any, str] = {
        int: "integer", float: "number", bool: "true or false", str: "text", Path: "path",
        SecretStr: "secret",
    }  # fmt: skip
    if kind in names:
        return names[kind]
    if get_origin(kind) is tuple:
        return f"list of {_type_name(get_args(kind)[0])}"
    if get_args(kind):
        parts = [arg for arg in get_args(kind) if arg is not type(None)]
        if get_origin(kind) is Literal:
            return " or ".join(f"`{part}`" for part in parts)
        return " or ".join(_type_name(part) for part in parts)
    return "keys below"


def _default(key: str, value: Any) -> str:
    return "required" if value is PydanticUndefined else _readable(key, value)


def _readable(key: str, value: Any) -> str:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and "bytes" in key:
        for size, unit in _SIZES:
            if value >= size and value % size == 0:
                return f"{value // size} {unit}"
    if isinstance(value, float) and key.endswith("_s") and not key.endswith("_per_s"):
        return f"{value:g} s"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, tuple):
        return f"`{json.dumps(value)}`"
    return f"`{value}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    stale = stale_pages()
    for page in stale:
        if "--check" in arguments:
            print(f"{page.relative_to(ROOT)} is stale: run `make docs`", file=sys.stderr)
        else:
            page.parent.mkdir(exist_ok=True)
            page.write_text(pages()[page])
            print(f"written: {page.relative_to(ROOT)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
