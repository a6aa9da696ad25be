"""docs/security.md: every line has a state, and every test it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
STATES = {"wired", "built", "open", "accepted"}


def rows() -> list[tuple[str, str, list[str]]]:
    """(threat, state, tests) of every threat on the page."""
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and cells[0] not in ("threat", "---"):
            found.append((cells[0], cells[2], re.findall(r"`(tests/[^`]+)`", cells[3])))
    return found


def functions(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_the_page_has_every_actor_and_its_threats() -> None:
    assert len(rows()) > 30
    for actor in ("Client", "Tenant", "Network attacker", "Compromised peer", "Local user"):
        assert re.search(rf"^## {actor}", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("threat", "state", "tests"), rows())
def test_each_threat_has_a_state_and_is_tested_where_something_stands_against_it(
    threat: str, state: str, tests: list[str]
) -> None:
    assert state in STATES
    assert bool(tests) == (state in {"wired", "built"}), threat
    for name in tests:
        file, _, function = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert function in functions(ROOT / file), name
