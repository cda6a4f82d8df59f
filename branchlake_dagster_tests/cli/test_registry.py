"""Commands that other modules define."""

from __future__ import annotations

import sys
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

from branchlake_dagster.cli import main
from branchlake_dagster.cli.registry import CommandGroup
from branchlake_dagster.extras import MissingExtra, require_modules


@click.command()
def greet() -> None:
    """Greet the caller."""
    click.echo("hello")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> CommandGroup:
    module = ModuleType("commands_of_a_test")
    module.greet = greet
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sources = dict.fromkeys(("greet", "hello"), "commands_of_a_test:greet")
    return CommandGroup("group", sources=sources, former_names=["hello"])


@pytest.mark.parametrize("name", ["greet", "hello"])
def test_a_command_of_another_module_runs(group: CommandGroup, name: str) -> None:
    done = CliRunner().invoke(group, [name], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, "hello\n")


def test_help_lists_commands_but_not_their_former_names(group: CommandGroup) -> None:
    listed = CliRunner().invoke(group, ["--help"], catch_exceptions=False).output
    assert "greet" in listed
    assert "hello" not in listed


def test_an_unknown_command_is_a_usage_error(group: CommandGroup) -> None:
    assert CliRunner().invoke(group, ["unknown"]).exit_code == click.UsageError.exit_code


@pytest.mark.parametrize("arguments", [["sda"], ["sda", "conjunctions", "--object", "1"], ["sda", "--help"]])
def test_a_command_without_its_extra_is_listed_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("branchlake_dagster.sda")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sgp4", None)
    with pytest.raises(MissingExtra) as expected:
        require_modules("sda", "sgp4", needed_by="The pipeline")
    listed = CliRunner().invoke(main, ["--help"], catch_exceptions=False)
    assert listed.exit_code == 0
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert expected.value.hint in done.output
