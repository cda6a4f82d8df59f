"""The command line as click has it."""

from __future__ import annotations

from collections.abc import Iterator

import click


def subcommands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """The commands of a group by name, those that it imports from other modules included."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield name, command
