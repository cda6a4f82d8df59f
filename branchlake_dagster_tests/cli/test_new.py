"""A project made by the template and one with the component, both through `dg`."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path

import pytest
from click.testing import CliRunner
from dagster import DagsterInstance

from branchlake_dagster import WarmRunLauncher
from branchlake_dagster.cli.main import create_project, format_requirement, main
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.testing import ThrowawayLake
from branchlake_dagster_tests.dagster_internals import get_env_var_dict
from branchlake_dagster_tests.suite.raised import raising
from branchlake_dagster_tests.testing.conftest import branchlake_server, lake, lake_settings

__all__ = ["branchlake_server", "lake", "lake_settings"]

# Processes of dg, seconds each, and one project for all that is done to it.
pytestmark = pytest.mark.nessie

_ROOT = Path(__file__).parents[2]
PLAIN = """\
from pathlib import Path

import dagster as dg


@dg.definitions
def defs() -> dg.Definitions:
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""


def dg_says(project: Path, *arguments: str, expect: int = 0, **environment: str) -> str:
    """What `dg` prints on standard output; on both when it is expected to fail."""
    return said(project, [str(Path(sys.executable).parent / "dg"), *arguments], expect, environment)


def said(project: Path, command: list[str], expect: int, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=project,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("BRANCHLAKE_")},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(project / "src"), *filter(None, sys.path)]),
            "PYTHONWARNINGS": "ignore",
            "COLUMNS": "200",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout if expect == 0 else done.stdout + done.stderr


def keys(told: str, kind: str) -> set[str]:
    return {one.get("key") or one.get("asset_key") or one["name"] for one in json.loads(told)[kind]}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("made") / "my-shop"
    made = create_project(target)
    assert target / "src" / "my_shop" / "definitions.py" in made
    return target


def test_dg_dev_finds_the_configuration_that_up_would_write(project: Path) -> None:
    """Without it `dg dev` would not watch its runs, and would send usage statistics."""
    home = project / ".branchlake" / "dagster"
    with DagsterInstance.from_config(str(home)) as instance:
        assert isinstance(instance.run_launcher, WarmRunLauncher)
        assert instance.run_monitoring_enabled
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
    assert {one.name for one in home.rglob("*.db")} == {"runs.db", "index.db", "schedules.db"}


@pytest.mark.soak  # its own tests, and its launch, load it too
def test_the_templates_project_loads_and_has_the_machinery(project: Path) -> None:
    assert "All definitions loaded successfully" in dg_says(project, "check", "defs")
    told = dg_says(project, "list", "defs", "--json")
    assert keys(told, "assets") == {"shop/prices"}
    (asset,) = json.loads(told)["assets"]
    assert (asset["owners"], sorted(asset["kinds"])) == ([{"team": "shop"}], ["iceberg", "polars"])
    assert keys(told, "sensors") == {"publication_sensor", "dead_writer_sensor"}
    assert keys(told, "resources") == {"io_manager", "lakehouse", "spark"}


@pytest.fixture
def mistaken(project: Path) -> Iterator[Path]:
    """The project with an asset that must not be loaded."""
    asset = project / "src" / "my_shop" / "defs" / "prices.py"
    right = asset.read_text()
    asset.write_text(right.replace('table_metadata(partition_by="day") | ', ""))
    yield project
    asset.write_text(right)


def test_a_mistake_in_an_asset_is_reported_by_name(mistaken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(mistaken / "src")
    # Written within the second in which the right one may have been compiled.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    try:
        with raising(
            ConfigurationError, "table_metadata(partition_by", reason="definitions", subject="shop/prices"
        ):
            importlib.import_module("my_shop.definitions").defs()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_shop"]:
            del sys.modules[name]


@pytest.mark.soak  # the test above, in a process of dg
def test_a_mistake_in_an_asset_fails_the_check_by_name(mistaken: Path) -> None:
    told = dg_says(mistaken, "check", "defs", expect=1)
    assert "- shop/prices: A partitioned asset that replaces its whole table" in told


def test_its_own_tests_pass_in_this_process(
    project: Path, lake: ThrowawayLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(project / "src")
    namespace = runpy.run_path(str(project / "tests" / "test_prices.py"))
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        more = {"monkeypatch": monkeypatch} if "monkeypatch" in signature(test).parameters else {}
        test(lake, **more)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_shop"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.soak  # pytest with its configuration; the tests themselves have passed before
def test_its_own_tests_pass(project: Path) -> None:
    told = said(project, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], 0, {})
    assert "2 passed" in told


PUBLISH = """\
import dagster as dg
from my_shop.definitions import defs

from branchlake_dagster import connect, publish

with dg.DagsterInstance.get() as instance:
    (run,) = instance.get_runs()
    outcome = publish(run, defs(), instance=instance)
assert outcome.published, outcome
print(connect().sql("SELECT sum(eur) AS eur FROM shop.prices").polars()["eur"].item())
"""


def test_launched_by_dg_and_published(project: Path, lakehouse: Lakehouse, tmp_path: Path) -> None:
    lakehouse.endpoints(spark=False)
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    own = {
        "DAGSTER_HOME": str(tmp_path),
        "BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir),
        "BRANCHLAKE_GUARD_NESSIE": "false",
    }
    dg_says(project, "launch", "--assets", "shop/prices", "--partition", "2026-01-05", **own)
    assert float(said(project, [sys.executable, "-c", PUBLISH], 0, own)) == pytest.approx(3.7)


def test_a_scaffolded_component_brings_the_machinery(project: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    create_project(plain)
    (plain / "src" / "plain" / "definitions.py").write_text(PLAIN)
    dg_says(plain, "scaffold", "defs", "branchlake_dagster.components.BranchlakeComponent", "lake")
    yaml = plain / "src" / "plain" / "defs" / "lake" / "defs.yaml"
    assert "BranchlakeComponent" in yaml.read_text()
    yaml.write_text(
        "type: branchlake_dagster.components.BranchlakeComponent\n\nattributes:\n  name: archive\n"
        "  io_manager_key: io_manager\n  settings:\n    keep_failed_hours: 4\n"
    )
    dg_says(plain, "check", "yaml")
    told = dg_says(plain, "list", "defs", "--json")
    assert keys(told, "sensors") == {"archive_publication_sensor", "archive_dead_writer_sensor"}
    assert keys(told, "resources") == {"archive_lakehouse", "archive_spark", "io_manager"}
    yaml.write_text(yaml.read_text().replace("keep_failed_hours", "keep_failed_ours"))
    assert "unknown setting keep_failed_ours" in dg_says(plain, "check", "defs", expect=1)


@pytest.mark.parametrize(
    ("direct_url", "requirement"),
    [
        (None, "branchlake_dagster[embedded,query,ui]>=0.1.0"),
        (
            {"url": "file:///src/branchlake", "dir_info": {"editable": True}},
            "branchlake_dagster[embedded,query,ui] @ file:///src/branchlake",
        ),
        (
            {"url": "https://git.example.org/b.git", "vcs_info": {"vcs": "git", "commit_id": "4f6c"}},
            "branchlake_dagster[embedded,query,ui] @ git+https://git.example.org/b.git@4f6c",
        ),
    ],
)
def test_a_project_depends_on_the_package_that_made_it(
    direct_url: Mapping[str, object] | None, requirement: str
) -> None:
    assert format_requirement(json.dumps(direct_url) if direct_url else None, "0.1.0") == requirement


def test_dagsters_home_is_in_the_project_unless_the_shell_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_project(tmp_path / "shop")
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    home = get_env_var_dict(str(tmp_path / "shop"))["DAGSTER_HOME"]
    assert home == str(tmp_path / "shop" / ".branchlake" / "dagster")
    assert Path(home).is_dir()
    monkeypatch.setenv("DAGSTER_HOME", "/elsewhere")
    assert get_env_var_dict(str(tmp_path / "shop"))["DAGSTER_HOME"] == "/elsewhere"


def test_it_is_installed_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """From a wheel; whatever else it needs is taken from the environment of the tests, without an index."""
    source = tmp_path / "source"
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        source.mkdir(exist_ok=True)
        shutil.copy(_ROOT / name, source / name)
    shutil.copytree(
        _ROOT / "branchlake_dagster",
        source / "branchlake_dagster",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    pip = ["-m", "pip", "--disable-pip-version-check"]
    wheel = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(source),
    ]
    said(tmp_path, [sys.executable, *pip, *wheel], 0, {})
    (built,) = tmp_path.glob("*.whl")
    told = json.dumps({"url": built.as_uri(), "archive_info": {}})
    create_project(tmp_path / "my-shop", requirement=format_requirement(told, "0.1.0"))
    venv.create(tmp_path / "own", with_pip=False)  # pip itself would take longer than all else
    python = tmp_path / "own" / "bin" / "python"
    (packages,) = (tmp_path / "own" / "lib").glob("*/site-packages")
    (packages / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    bare = {"PYTHONPATH": ""}
    install = ["install", "--quiet", "--no-index", "--no-build-isolation", "-e", ".[dev]"]
    said(tmp_path / "my-shop", [sys.executable, *pip, "--python", str(python), *install], 0, bare)
    found = "import branchlake_dagster as package, inspect, my_shop; print(inspect.getfile(package))"
    assert said(tmp_path, [str(python), "-P", "-c", found], 0, bare).startswith(str(packages))
    (packages / "branchlake_dagster" / "cli" / "template" / ".env.template").stat()


@pytest.mark.parametrize("name", ["2shops", "class", "sh/op$", "größen", "_shop", "shop-", "a\n"])
def test_a_name_that_python_or_pip_refuses_is_refused(tmp_path: Path, name: str) -> None:
    with raising(ConfigurationError, reason="package_name", subject=Path(name).name):
        create_project(tmp_path / name)


@pytest.mark.parametrize(
    "name",
    ["test", "dagster", "polars", "branchlake-dagster", "Branchlake-Dagster", "PyYAML", "Dagster", "grpcio"],
)
def test_a_name_that_would_hide_another_module_is_refused(tmp_path: Path, name: str) -> None:
    with raising(ConfigurationError, reason="package_name", subject=name):
        create_project(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_the_working_folder_can_be_the_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-shop").mkdir()
    monkeypatch.chdir(tmp_path / "my-shop")
    create_project(Path())
    assert (tmp_path / "my-shop" / "src" / "my_shop" / "definitions.py").is_file()


def test_the_command_to_go_there_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["new", "my shop"])
    assert result.exit_code == 0, result.output
    folder, *_ = shlex.split(result.stderr.partition("cd ")[2])
    assert folder.rstrip(";") == "my shop"


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "mine.txt").write_text("mine")
    with raising(ConfigurationError, reason="folder_exists", subject=str(tmp_path / "shop")):
        create_project(tmp_path / "shop")
    assert [path.name for path in (tmp_path / "shop").iterdir()] == ["mine.txt"]
