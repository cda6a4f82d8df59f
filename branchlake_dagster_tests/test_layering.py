"""Which package may import which, held against the imports as they are written."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import branchlake_dagster as root
from branchlake_dagster_tests.suite.source_statements import statements

ROOT = Path(__file__).parents[1] / "branchlake_dagster"
NAME = ROOT.name

_BASE = {"errors", "extras", "file_lock", "stored_names", "waiting", "wording", "internals", "settings"}
_LAKE = {*_BASE, "nessie", "catalog", "embedded", "spark", "lakehouse"}
_RUNS = {*_LAKE, "history", "tables", "runs"}
_ASSETS = {*_RUNS, "incremental", "io_manager", "publication", "checks", "automation"}

ALLOWED: dict[str, set[str]] = {
    "stored_names": set(),
    "wording": set(),
    "errors": {"wording"},
    "internals": set(),
    "file_lock": set(),
    "waiting": set(),
    "extras": {"errors"},
    "settings": {"errors"},
    "nessie": _BASE,
    "catalog": {*_BASE, "nessie"},
    "embedded": {*_BASE, "nessie"},
    "spark": {*_BASE, "nessie", "embedded"},
    "lakehouse": {*_BASE, "nessie", "catalog", "embedded", "spark"},
    "backup": {*_BASE, "nessie", "catalog", "embedded", "lakehouse", "receivers"},
    "launching": {*_BASE, "nessie", "embedded"},
    "receivers": {*_BASE, "embedded"},
    "history": {*_BASE, "catalog"},
    "tables": {*_LAKE, "history"},
    "runs": {*_LAKE, "history", "tables"},
    "cleanup": _RUNS,
    "incremental": _RUNS,
    "io_manager": {*_RUNS, "incremental"},
    "publication": {*_RUNS, "cleanup", "incremental", "io_manager"},
    "checks": {*_RUNS, "incremental", "io_manager", "publication"},
    "automation": {*_RUNS, "incremental", "io_manager", "publication"},
    "ingest": {*_ASSETS, "expiry", "receivers"},
    "query": {*_RUNS, "publication"},
    "testing": {*_RUNS, "io_manager", "publication"},
    "expiry": {*_RUNS, "incremental", "publication"},
    "compaction": {*_RUNS, "publication"},
    "undo": {*_RUNS, "automation", "incremental", "publication"},
    "lake_definitions": {*_RUNS, "cleanup", "expiry", "incremental", "io_manager", "publication", "undo"},
    "garbage_collection": _RUNS,
    "components": {*_RUNS, "lake_definitions"},
    "maintenance": {*_RUNS, "compaction", "expiry", "garbage_collection"},
    "cli": {
        *_ASSETS,
        "backup",
        "cleanup",
        "compaction",
        "expiry",
        "garbage_collection",
        "ingest",
        "maintenance",
        "query",
        "undo",
    },
    "bench": {
        *_ASSETS,
        "cleanup",
        "compaction",
        "expiry",
        "garbage_collection",
        "ingest",
        "maintenance",
        "query",
        "receivers",
        "cli",
        "lake_definitions",
        "undo",
    },
    "sda": {*_ASSETS, "ingest", "query", "receivers", "cli", "bench", "lake_definitions", "maintenance"},
    "definitions": {"settings", "sda"},
}
"""The packages and modules directly under the root, and what each may import. Only downwards."""


@cache
def imported(path: Path) -> tuple[str, ...]:
    """The names inside our own package that a file imports, wherever in it they stand."""
    tree = ast.parse(path.read_text(), str(path))
    if path == ROOT / "errors.py":  # it shows all errors to type checkers, and imports them when asked for
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    found = []
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            # `from package import x` imports the module x.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith(f"{NAME}."):
                inner = name.removeprefix(f"{NAME}.")
                # What the root offers comes from where it lives.
                found.append(f"{root._HOME_OF[inner]}.{inner}" if inner in root._HOME_OF else inner)
    return tuple(found)


def sources() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


@cache
def graph() -> dict[str, dict[str, list[str]]]:
    """importer -> imported -> the files that do it."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sources():
        place = path.relative_to(ROOT)
        importer = place.parts[0].removesuffix(".py")
        edges = found.setdefault(importer, {})
        for name in (dotted.partition(".")[0] for dotted in imported(path)):
            if name != importer:
                edges.setdefault(name, []).append(str(place))
    return found


@cache
def folder_of(dotted: str) -> str:
    """The folder that a module or a name in one lies in; a module directly under the root is its own."""
    parts = dotted.split(".")
    while (
        parts and not ROOT.joinpath(*parts).is_dir() and not ROOT.joinpath(*parts).with_suffix(".py").exists()
    ):
        parts.pop()
    if ROOT.joinpath(*parts).is_dir() or len(parts) == 1:
        return ".".join(parts)
    return ".".join(parts[:-1])


def folders() -> dict[str, set[str]]:
    """importing folder -> imported folders."""
    found: dict[str, set[str]] = {}
    for path in sources():
        # What a folder offers at its door (`__init__`) is counted where it lies.
        importer = folder_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        found.setdefault(importer, set()).update(map(folder_of, imported(path)))
    return {importer: names - {importer} for importer, names in found.items()}


def test_every_package_has_its_place() -> None:
    assert set(graph()) == set(ALLOWED)


@pytest.mark.parametrize("importer", ALLOWED)
def test_imports_point_downwards_only(importer: str) -> None:
    wrong = {name: files for name, files in graph()[importer].items() if name not in ALLOWED[importer]}
    assert not wrong


def test_only_the_code_location_imports_the_domain() -> None:
    knowing = {importer for importer, edges in graph().items() if "sda" in edges}
    assert knowing == {"definitions"}


def test_the_folders_have_no_cycle() -> None:
    order = list(TopologicalSorter(folders()).static_order())
    assert order.index("nessie") < order.index("tables") < order.index("runs") < order.index("publication")
