"""The documentation names what there is, and only that."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from pydantic import BaseModel

from policies.policy_file import PolicyFile
from policies.scenario import Scenario
from prfaas.cli import cli
from prfaas.profile import Profile
from prfaas.snapshot import Reason
from scripts.metrics_page import REGISTRIES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_OUR_PATH = re.compile(
    r"^(?:prfaas|prfaas_connect|gateway|policies|local_engine|remote_prefill|proto|tests|bench|docs"
    r"|deploy|scripts|\.ci)/[\w./-]*$"
)


def page_ids(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(params=PAGES, ids=page_ids)
def page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def code_spans(page: Path) -> Iterator[str]:
    for match in _CODE.finditer(page.read_text()):
        yield match.group(1)


def test_every_file_a_page_names_exists(page: Path) -> None:
    missing = [
        name
        for name in code_spans(page)
        if _OUR_PATH.match(name) and not (ROOT / name).exists() and "results" not in name
    ]
    assert missing == []


def test_every_relative_link_leads_somewhere(page: Path) -> None:
    targets = [t for t in _LINK.findall(page.read_text()) if "://" not in t]
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_every_command_a_page_shows_exists(page: Path) -> None:
    for span in code_spans(page):
        words = span.split()
        if words[0] == "prfaas" and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
            command = cli.commands.get(words[1])
            assert command is not None, span
            for option in (word.split("=")[0] for word in words if word.startswith("--")):
                known = {name for p in command.params for name in p.opts + p.secondary_opts}
                assert option in known | {"--help"}, span
        if words[0] == "make" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            assert words[1] in make_targets(), span


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_every_reason_is_explained_to_operators() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert [reason for reason in Reason if f"`{reason}`" not in text] == []


def test_every_metrics_registry_is_on_the_metrics_page() -> None:
    packages = ("prfaas", "gateway", "policies", "local_engine", "remote_prefill")
    makes = {
        path.relative_to(ROOT).as_posix()
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if "CollectorRegistry()" in path.read_text()
    }
    assert makes == set(REGISTRIES)


def test_both_readmes_have_the_same_shape() -> None:
    english, chinese = (
        [re.match(r"#+", line) for line in (ROOT / name).read_text().splitlines()]
        for name in ("README.md", "README.zh-CN.md")
    )
    levels = [[match.group() for match in lines if match] for lines in (english, chinese)]
    assert levels[0] == levels[1]


def test_the_two_commands_of_the_readme_are_targets() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make run" in text
    assert "make test" in text
    for target in ("run", "test"):
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr


def test_every_command_has_help() -> None:
    def walk(command: click.Command) -> Iterator[click.Command]:
        yield command
        if isinstance(command, click.Group):
            for inner in command.commands.values():
                yield from walk(inner)

    for command in walk(cli):
        assert command.help
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.help, f"{command.name} {option.name}"


@pytest.mark.parametrize(
    ("page", "mark", "model"),
    [
        ("scenarios.md", "name: two-clusters", Scenario),
        ("policies.md", "name: my-engine", Profile),
        ("policies.md", "policy_version: 1", PolicyFile),
    ],
)
def test_a_file_that_a_page_shows_is_one_that_is_read(
    page: str, mark: str, model: type[BaseModel]
) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    (text,) = (block for block in blocks if block.startswith(mark))
    model.model_validate(yaml.safe_load(text))
