"""Commands work with the settings of the code location's lake: named with `-m`, or by the project's files."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from branchlake_dagster.cli import doctor, main, run_branches
from branchlake_dagster.cli.command_settings import ENVIRONMENT, find_project_files, load_command_settings
from branchlake_dagster.cli.location import format_settings, require_location
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse import lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.raised import raising

MODULE = """
import dagster as dg
from branchlake_dagster import Settings, branchlake_definitions

defs = branchlake_definitions(Settings(keep_failed_hours=8, state_dir="{state}"), dg.Definitions())
"""
LAZY = """
import dagster as dg
from branchlake_dagster import Settings, branchlake_definitions

@dg.definitions
def defs():
    return branchlake_definitions(Settings(keep_failed_hours=8, state_dir="{state}"), dg.Definitions())
"""
SEVERAL = """
import dagster as dg
from branchlake_dagster import LakehouseResource

lakes = {{name: LakehouseResource(state_dir=folder) for name, folder in {folders!r}.items()}}
defs = dg.Definitions(resources=lakes)
"""
WITHOUT_LAKE = """
import dagster as dg

defs = dg.Definitions()
"""
BY_VARIABLE = """
import dagster as dg
from branchlake_dagster import LakehouseResource

defs = dg.Definitions(resources={"lake": LakehouseResource(state_dir=dg.EnvVar("STATE_OF_LAKE"))})
"""
NAME = "location_of_eight_hours"
DAGSTER_TABLE = f'[tool.dagster]\nmodule_name = "{NAME}"\n'
DG_TABLE = f"""
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "unused"
code_location_target_module = "{NAME}"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, without any file that names a code location."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path / "of_environment"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("location_of", "no_lake", "two_lakes", "broken")):
            sys.modules.pop(name)


@pytest.fixture
def module(project: Path) -> str:
    """A module with a code location whose settings are given in code."""
    write(project, NAME, MODULE.format(state=project / "of_code"))
    return NAME


def write(project: Path, name: str, content: str) -> None:
    (project / f"{name}.py").write_text(content)


def workspace(project: Path, *names: str) -> None:
    lines = "".join(f"  - python_module: {name}\n" for name in names)
    (project / "workspace.yaml").write_text(f"load_from:\n{lines}")


def settings_of(module: str | None) -> Settings:
    return load_command_settings(module).settings


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
        (run_branches, "gather_status"),
        (run_branches, "gather_parked_runs"),
        (doctor, "examine_setup"),
        (lakehouse, "Lakehouse"),
    ):
        monkeypatch.setattr(imported_by_command, name, look)
    result = CliRunner().invoke(main, [command, "-m", module])
    assert isinstance(result.exception, LookedError), result.output
    assert [one.state_dir for one in seen] == [tmp_path / "of_code"]
    assert "-m" in CliRunner().invoke(main, [command, "--help"]).output


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("pyproject.toml", DAGSTER_TABLE),
        ("pyproject.toml", DG_TABLE),
        ("dg.toml", DG_TABLE.replace("tool.dg.", "").replace("[tool.dg]", "")),
        ("workspace.yaml", f"load_from:\n  - python_module: {NAME}\n"),
        ("workspace.yml", f"load_from:\n  - python_file: {NAME}.py\n"),
    ],
)
@pytest.mark.parametrize("source", [MODULE, LAZY])
def test_the_files_of_a_project_name_the_code_location(
    file: str, content: str, source: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, NAME, source.format(state=project / "of_code"))
    (project / file).write_text(content)
    found = load_command_settings(None)
    assert found.settings.state_dir == project / "of_code"
    assert [(one.origin, Path(one.name).stem) for one in found.locations] == [(file, NAME)]
    printed = capsys.readouterr()
    assert file in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize("command", ["status", "sql", "down", "set-aside", "reap"])
def test_a_command_without_a_module_works_with_the_lake_of_the_project(
    command: str, module: str, project: Path
) -> None:
    (project / "pyproject.toml").write_text(DAGSTER_TABLE)
    result = CliRunner().invoke(main, [command])
    assert module in result.stderr
    assert "pyproject.toml" in result.stderr
    assert not (project / "of_environment").exists()


def test_a_module_is_named_as_the_source(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_command_settings(module).source == f"lakehouse of {module} (-m)"
    assert capsys.readouterr().err == f"settings: lakehouse of {module} (-m)\n"


@pytest.mark.parametrize("named", [True, False])
def test_what_a_location_prints_stays_out_of_the_output(named: bool, module: str, project: Path) -> None:
    (project / "pyproject.toml").write_text(DAGSTER_TABLE)
    noise = "print('printed at import')\nimport warnings\nwarnings.warn('a warning')\n"
    write(project, module, noise + MODULE.format(state=project / "of_code"))
    done = CliRunner().invoke(main, ["status", "--json", *(["-m", module] if named else [])])
    assert json.loads(done.stdout)["state_dir"] == str(project / "of_code")
    assert "a warning" not in done.stderr


def test_outside_a_project_nothing_is_loaded_or_printed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "pyproject.toml").write_text('[project]\nname = "something"\n')
    assert find_project_files() == []
    assert load_command_settings(None).settings.state_dir == project / "of_environment"
    assert capsys.readouterr().err == ""
    with pytest.raises(click.UsageError):
        require_location(None)


def test_a_project_without_a_lake_changes_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, "no_lake", WITHOUT_LAKE)
    workspace(project, "no_lake")
    found = load_command_settings(None)
    assert found.settings.state_dir == project / "of_environment"
    assert found.source == ENVIRONMENT
    assert capsys.readouterr().err == ""


def test_of_several_locations_the_one_with_a_lake_counts(module: str, project: Path) -> None:
    write(project, "no_lake", WITHOUT_LAKE)
    workspace(project, "no_lake", module)
    assert settings_of(None).state_dir == project / "of_code"
    location, _ = require_location(None)
    assert location.name == module


def test_a_location_that_cannot_be_loaded_is_reported_in_one_line(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, "broken", "raise RuntimeError('first line\\nsecond line')")
    workspace(project, "broken")
    found = load_command_settings(None)
    assert found.settings.state_dir == project / "of_environment"
    assert found.trouble is not None
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ConfigurationError):
        require_location(None)


@pytest.mark.parametrize(
    "command",
    [
        ["reap"],
        ["set-aside", "retry", "a"],
        ["set-aside", "end", "a"],
        ["columns", "drop", "shop.prices", "n"],
        ["backfill", "approve", "a"],
    ],
)
def test_a_command_that_changes_the_lake_must_know_which_lake(
    project: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """With a broken code location, the environment's default lake may be somebody else's."""
    write(project, "broken", "raise RuntimeError")
    workspace(project, "broken")
    monkeypatch.delenv("BRANCHLAKE_STATE_DIR")
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, "BRANCHLAKE_STATE_DIR" in done.output) == (1, True)
    assert not (project / ".branchlake").exists()
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(project / "of_environment"))
    assert load_command_settings(None).require_named_lake().state_dir == project / "of_environment"


def test_a_file_that_dagster_cannot_read_is_reported_in_one_line(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "pyproject.toml").write_text("[tool.dagster\n")
    assert load_command_settings(None).trouble is not None
    assert capsys.readouterr().err.count("\n") == 1


def test_one_lake_of_two_locations_is_used(module: str, project: Path) -> None:
    write(project, "location_of_another", MODULE.format(state=project / "of_code"))
    workspace(project, module, "location_of_another")
    assert settings_of(None).state_dir == project / "of_code"
    with pytest.raises(click.UsageError) as raised:
        require_location(None)
    assert f"-m {module}" in raised.value.message


def test_two_lakes_of_two_locations_have_to_be_named(
    module: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, "location_of_another", MODULE.format(state=project / "another"))
    workspace(project, module, "location_of_another")
    with pytest.raises(ConfigurationError) as raised:
        load_command_settings(None)
    assert f"-m {module}" in (raised.value.hint or "")
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(project / "another"))
    assert settings_of(None).state_dir == project / "another"


def test_variables_of_the_env_file_reach_the_code_location(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_OF_LAKE", "removed below, and set back after the test")
    monkeypatch.delenv("STATE_OF_LAKE")
    write(project, "location_of_variable", BY_VARIABLE)
    workspace(project, "location_of_variable")
    (project / ".env").write_text(f"STATE_OF_LAKE={project / 'of_file'}\nBRANCHLAKE_STATE_DIR=/elsewhere\n")
    assert settings_of(None).state_dir == project / "of_file"
    assert os.environ["BRANCHLAKE_STATE_DIR"] == str(project / "of_environment")


@pytest.mark.parametrize("content", [b"A=1\n\xff\xfe\n", b"A=1\x00\n", b"\x00=1\n"])
def test_an_env_file_that_cannot_be_loaded_is_named(project: Path, content: bytes) -> None:
    write(project, "no_lake", WITHOUT_LAKE)
    workspace(project, "no_lake")
    (project / ".env").write_bytes(content)
    with raising(ConfigurationError, reason="env_file", subject=str(project / ".env")):
        load_command_settings(None)
    with raising(ConfigurationError, reason="env_file", subject=str(project / ".env")):
        load_command_settings("no_lake")


def test_status_and_doctor_say_where_their_settings_come_from(module: str, project: Path) -> None:
    assert (
        run_branches.gather_status(Settings(), "lake of shop (-m)")["settings_source"] == "lake of shop (-m)"
    )
    found = doctor.examine_setup(Settings(), "lake of shop (-m)", "broken cannot be loaded")
    states = {(one.place, one.looked_at): one.state for one in found.findings}
    assert states["Settings", "source"] == "right"
    assert states["Settings", "code location"] == "off"


def test_a_location_without_a_lake_follows_the_environment(project: Path) -> None:
    write(project, "no_lake", WITHOUT_LAKE)
    assert settings_of("no_lake").state_dir == project / "of_environment"


def test_of_several_lakes_the_environment_names_one(project: Path) -> None:
    both = {"one": str(project / "of_environment"), "two": str(project / "another")}
    write(project, "two_lakes", SEVERAL.format(folders=both))
    assert settings_of("two_lakes").state_dir == project / "of_environment"
    others = {"one": str(project / "a"), "two": str(project / "b")}
    write(project, "two_lakes_unnamed", SEVERAL.format(folders=others))
    with pytest.raises(ConfigurationError):
        settings_of("two_lakes_unnamed")


@pytest.mark.parametrize(
    "code",
    [
        "{}['a']",
        "nowhere",
        "def f(:",
        "raise RuntimeError('first line\\nsecond line')",
        "import dagster as dg\n@dg.asset\ndef a(): ...\ndefs = dg.Definitions(assets=[a, a], jobs=[1])",
        "from dagster import DagsterInvalidDefinitionError as E\nraise E('first line\\nsecond line')",
    ],
    ids=["KeyError", "NameError", "SyntaxError", "RuntimeError", "TypeError", "DagsterError"],
)
def test_a_module_that_cannot_be_loaded_is_one_line(project: Path, code: str) -> None:
    write(project, "broken", code)
    with pytest.raises(ConfigurationError) as caught:
        settings_of("broken")
    assert "broken" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_mistake_in_the_definitions_of_a_module_is_reported_as_it_is(project: Path) -> None:
    write(
        project,
        "broken",
        "from branchlake_dagster.errors import ConfigurationError\n"
        "raise ConfigurationError('The lake is unknown.', reason='lake_unknown')",
    )
    with raising(ConfigurationError, reason="lake_unknown"):
        settings_of("broken")


def test_a_module_without_definitions_is_named(module: str) -> None:
    with pytest.raises(ConfigurationError):
        settings_of("nowhere_at_all")
