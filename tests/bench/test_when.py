"""What docs/when.md says is what its commands print, where they are quick."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.when import SECTIONS

PAGE = Path(__file__).parents[2] / "docs" / "when.md"


@pytest.mark.parametrize("section", ["lengths", "short"])
def test_the_page_has_the_numbers_that_its_command_prints(
    section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text()
    assert f"python -m bench.when {section}" in page
    SECTIONS[section]()
    rows = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    if section == "short":
        told = {f"{float(cells[1]):.1f}" for cells in rows[1:]}
    else:
        told = {cell for cells in rows[1::2] for cell in cells[1:]}
    assert len(told) > 2
    assert {each for each in told if each not in page} == set()
