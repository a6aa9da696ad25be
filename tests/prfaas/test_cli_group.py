"""A command's help shows what each command below it does, in whole sentences."""

from __future__ import annotations

import click
from click.testing import CliRunner

from prfaas.cli_group import CommandGroup


def test_sentences_are_wrapped_and_not_cut() -> None:
    @click.group(cls=CommandGroup)
    def top() -> None:
        """All of it."""

    @top.group()
    def inner() -> None:
        """Below."""

    @inner.command()
    def work() -> None:
        """Do something that takes many more words to say than fit in one line of a page of help.

        And more.
        """

    shown = " ".join(CliRunner().invoke(top, ["inner", "--help"]).output.split())
    assert "than fit in one line of a page of help." in shown
    assert "And more" not in shown
    assert "inner Below." in " ".join(CliRunner().invoke(top, ["--help"]).output.split())
