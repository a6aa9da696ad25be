"""A group of commands whose help shows the first sentence of each one whole."""

from __future__ import annotations

import click

_LONGEST_CHARS = 200


class CommandGroup(click.Group):
    """As click's, which cuts a sentence longer than a line; groups within it are the same."""

    group_class = type

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names and sentences, wrapped."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, self.commands[name].get_short_help_str(_LONGEST_CHARS))
                    for name in self.list_commands(ctx)
                ]
            )
