"""Commands with `-m` work with the settings of the code location's lake."""

import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.cli import main, set_aside, status
from branchlake_dagster.cli.doctor import command as doctor
from branchlake_dagster.cli.local.location import format_settings, location_settings, settings_of
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse import lakehouse
from branchlake_dagster.publication.runtime.definitions import branchlake_definitions
from branchlake_dagster.settings import Settings

MODULE = """
import dagster as dg
from branchlake_dagster import Settings, branchlake_definitions

defs = branchlake_definitions(Settings(keep_failed_hours=8, state_dir="{state}"), dg.Definitions())
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with a code location whose settings are given in code."""
    name = "location_of_eight_hours"
    (tmp_path / f"{name}.py").write_text(MODULE.format(state=tmp_path / "of_code"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path / "of_environment"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def test_settings_given_in_code_hold_for_the_command(module: str, tmp_path: Path) -> None:
    found = settings_of(module)
    assert found.keep_failed_hours == 8
    assert found.state_dir == tmp_path / "of_code"
    assert settings_of(None).keep_failed_hours == 0


def test_a_value_is_shown_with_its_source(module: str) -> None:
    names = ("keep_failed_hours", "discard_grace_h")
    shown = format_settings(settings_of(module), names, module)
    assert shown == f"keep_failed_hours=8 ({module}), discard_grace_h=24 (default)"


@pytest.mark.parametrize("command", ["reap", "status", "set-aside", "doctor"])
def test_the_command_looks_at_the_lake_of_the_code_location(
    command: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []

    class LookedError(Exception):
        pass

    def look(settings: Settings, *_: object, **__: object) -> None:
        seen.append(settings)
        raise LookedError

    for imported_by_command, name in (
        (status, "gather"),
        (set_aside, "gather"),
        (doctor, "examine"),
        (lakehouse, "Lakehouse"),
    ):
        monkeypatch.setattr(imported_by_command, name, look)
    result = CliRunner().invoke(main, [command, "-m", module])
    assert isinstance(result.exception, LookedError), result.output
    assert [one.state_dir for one in seen] == [tmp_path / "of_code"]
    assert "-m" in CliRunner().invoke(main, [command, "--help"]).output


def test_a_location_without_a_lake_follows_the_environment(module: str, tmp_path: Path) -> None:
    assert location_settings(dg.Definitions().get_repository_def()).state_dir == tmp_path / "of_environment"


def test_of_several_lakes_the_environment_names_one(module: str, tmp_path: Path) -> None:
    def lake(name: str) -> LakehouseResource:
        return LakehouseResource(state_dir=str(tmp_path / name), keep_failed_hours=3)

    both = dg.Definitions(resources={"one": lake("of_environment"), "two": lake("another")})
    assert location_settings(both.get_repository_def()).state_dir == tmp_path / "of_environment"
    others = dg.Definitions(resources={"one": lake("a"), "two": lake("b")})
    with pytest.raises(ConfigurationError):
        location_settings(others.get_repository_def())


def test_a_module_without_definitions_is_named(module: str) -> None:
    with pytest.raises(ConfigurationError):
        settings_of("nowhere_at_all")


def test_the_resource_of_the_definitions_has_the_settings(tmp_path: Path) -> None:
    defs = branchlake_definitions(Settings(keep_failed_hours=5, state_dir=tmp_path), dg.Definitions())
    assert location_settings(defs.get_repository_def()).keep_failed_hours == 5
