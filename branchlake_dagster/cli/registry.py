"""A command group that imports the modules of its commands on demand.

So `branchlake --help` and each command import only the modules that they need. `cli` does not import the
packages of benchmarks and of the space pipeline: the `sources` of its group name their commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from importlib import import_module
from typing import Any

import click

from branchlake_dagster.extras import MissingExtra


class CommandGroup(click.Group):
    """A click group that also contains commands of other modules.

    Args:
        sources: For each such command, its name and the click command as `package.module:attribute`.
        former_names: Names in `sources` that earlier versions documented. They work, but help omits them.
    """

    def __init__(
        self,
        *arguments: Any,
        sources: Mapping[str, str] | None = None,
        former_names: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._sources = sources or {}
        self._former_names = frozenset(former_names)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the sorted names of all commands."""
        return sorted({*super().list_commands(ctx), *self._sources})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, or None.

        A command that `sources` names is imported now. If an extra is missing, a substitute is returned that
        raises MissingExtra when it is run.
        """
        source = self._sources.get(cmd_name)
        if source is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = source.partition(":")
        try:
            command: click.Command = copy(getattr(import_module(module), attribute))
        except MissingExtra as error:
            return _unavailable_command(cmd_name, error)
        command.hidden = cmd_name in self._former_names
        return command


def print_progress(message: str) -> None:
    """Print a message to standard error, because standard output may be JSON."""
    click.echo(message, err=True)


def _unavailable_command(name: str, error: MissingExtra) -> click.Command:
    """Create a substitute for a command whose packages are missing. Running it raises `error`."""

    def callback(_: tuple[str, ...]) -> None:
        raise error

    return click.Command(
        name,
        callback=callback,
        params=[click.Argument(["_"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        help=str(error),
        short_help="Not installed: needs an extra.",
    )
