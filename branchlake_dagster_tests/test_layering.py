"""Which package may import which, held against the imports as they are written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "branchlake_dagster"
NAME = ROOT.name

ALLOWED: dict[str, set[str]] = {
    "settings": set(),
    "lakehouse": {"settings"},
    "branching": {"settings", "lakehouse"},
    "publication": {"settings", "lakehouse", "branching"},
    "checks": {"settings", "lakehouse", "branching", "publication"},
    "fusion": {"settings", "lakehouse", "branching", "publication", "checks"},
    "definitions": {"settings", "lakehouse", "branching", "publication", "checks", "fusion"},
    "cli": {"settings", "lakehouse", "branching", "publication", "checks", "fusion", "definitions"},
}
"""The packages and modules directly under the root, and what each may import. Only downwards."""


def imported(path: Path) -> Iterator[str]:
    """The second-level names of our own package that a file imports, wherever in it they stand."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            # `from package import x` imports the module x.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for parts in (name.split(".") for name in names):
            if parts[0] == NAME and len(parts) > 1:
                yield parts[1]


def graph() -> dict[str, dict[str, list[str]]]:
    """importer -> imported -> the files that do it."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        importer = place.parts[0].removesuffix(".py")
        if importer == "__init__":
            continue
        edges = found.setdefault(importer, {})
        for name in imported(path):
            if name != importer:
                edges.setdefault(name, []).append(str(place))
    return found


def test_every_package_has_its_place() -> None:
    assert set(graph()) == set(ALLOWED)


@pytest.mark.parametrize("importer", ALLOWED)
def test_imports_point_downwards_only(importer: str) -> None:
    wrong = {name: files for name, files in graph()[importer].items() if name not in ALLOWED[importer]}
    assert not wrong


def test_only_the_code_location_and_the_command_line_know_the_domain() -> None:
    knowing = {importer for importer, edges in graph().items() if "fusion" in edges}
    assert knowing <= {"definitions", "cli"}


def test_there_is_no_cycle() -> None:
    edges = {importer: set(names) for importer, names in graph().items()}
    order = list(TopologicalSorter(edges).static_order())
    assert order.index("lakehouse") < order.index("branching") < order.index("publication")
