"""Command groups whose commands are imported from their modules when they are needed.

`branchlake --help` and each command import only what they show or run. `cli` does not import the packages of
benchmarks and of the space pipeline; it names their commands in such a group's `sources`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from importlib import import_module
from typing import Any

import click

from branchlake_dagster.extras import MissingExtra


class CommandGroup(click.Group):
    """A click group that also has commands of other modules.

    Args:
        sources: the name of each such command -> `package.module:attribute`, where the click command is.
        former_names: names of `sources` that earlier versions documented. They work, but help omits them.
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
        """The names of all commands, sorted."""
        return sorted({*super().list_commands(ctx), *self._sources})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported if it is one of `sources`; None if there is none."""
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
    """Progress goes to standard error, so that `--json` output stays clean."""
    click.echo(message, err=True)


def _unavailable_command(name: str, error: MissingExtra) -> click.Command:
    """A command whose packages are not installed: help lists it, and running it raises the error."""

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
