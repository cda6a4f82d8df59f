"""What `--help` prints for each command."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner
from syrupy.assertion import SnapshotAssertion

from branchlake_dagster.cli import main
from branchlake_dagster_tests.suite.command_line import subcommands


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The command line of each command, groups included; not the hidden names of earlier versions."""
    yield path
    for name, command in subcommands(group):
        if command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", [*commands(main)], ids=lambda path: " ".join(path) or "branchlake")
def test_help(path: tuple[str, ...], snapshot: SnapshotAssertion) -> None:
    """Read the change of a snapshot as a user would: whole sentences, nothing cut, no markup."""
    done = CliRunner().invoke(main, [*path, "--help"], prog_name="branchlake", terminal_width=100)
    assert done.exit_code == 0
    assert "\\b" not in done.output
    assert not [line for line in done.output.splitlines()[1:] if line.endswith("...")]
    assert done.output == snapshot
