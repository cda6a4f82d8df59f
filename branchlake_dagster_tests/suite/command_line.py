"""The command line, as click describes it."""

from __future__ import annotations

from collections.abc import Iterator

import click


def subcommands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Return the commands of a group by name, including those that it imports lazily from other modules."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield name, command
