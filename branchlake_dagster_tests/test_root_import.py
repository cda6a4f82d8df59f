"""The one import that users need."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import branchlake_dagster as root

ROOT = Path(root.__file__).parent


@pytest.mark.parametrize("name", root.__all__)
def test_every_name_is_there_and_described(name: str) -> None:
    assert (inspect.getdoc(getattr(root, name)) or "").strip()


def test_the_type_checker_sees_what_is_loaded() -> None:
    """Names are loaded late, so nothing but this would notice one that only the type checker knows."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module
        for node in ast.walk(checked)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(seen) == set(root.__all__)
    for name, module in seen.items():
        assert root._HOME_OF[name] == str(module).removeprefix("branchlake_dagster.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        root.nonsense  # noqa: B018


def test_nothing_heavy_is_loaded_before_it_is_asked_for() -> None:
    script = (
        "import sys, branchlake_dagster\n"
        "from branchlake_dagster import Settings, BranchlakeError\n"
        "heavy = {'dagster', 'pyspark', 'pandas', 'pyiceberg', 'pynessie', 'pandera'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_pipeline_is_a_user_like_any_other() -> None:
    """What it needs of the machinery comes through the door, and is therefore at the door."""
    wrong = [
        f"{path.relative_to(ROOT)}: {node.module}"
        for path in (ROOT / "fusion").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and str(node.module).startswith("branchlake_dagster.")
        and not str(node.module).startswith("branchlake_dagster.fusion")
    ]
    assert wrong == ["fusion/__init__.py: branchlake_dagster.extras"]
