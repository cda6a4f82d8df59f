"""The one import that users need."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

import branchlake_dagster as root
from branchlake_dagster import testing
from branchlake_dagster_tests.suite.raised import raising

ROOT = Path(root.__file__).parent
INDEX = ROOT.parent / "docs" / "api.md"
DOORS = (root, testing)


def offered() -> list[tuple[ModuleType, str]]:
    return [(door, name) for door in DOORS for name in door.__all__]


def sections(text: str) -> dict[str, str]:
    """A docstring in Google's form: its summary and description under "", then its sections by name."""
    parts = re.split(r"^(Args|Attributes|Returns|Yields|Raises|Examples):\n", text, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def described(obj: Any) -> dict[str, str]:
    return sections(inspect.getdoc(obj) or "")


def parameters(function: Callable[..., Any]) -> list[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return [f"{stars.get(one.kind, '')}{one.name}" for one in found if one.name != "self"]


def documented(section: str) -> list[str]:
    return re.findall(r"^    (\S+?)(?: \(.+)?:", section, flags=re.MULTILINE)


@pytest.mark.parametrize(("door", "name"), offered())
def test_every_name_is_described_with_an_example(door: ModuleType, name: str) -> None:
    found = described(getattr(door, name))
    assert found[""].strip()
    if inspect.isclass(getattr(door, name)) and door is testing:
        return  # nobody makes one: the functions that do have the examples
    code = re.fullmatch(r"\s*\.\. code-block:: python\n\n(.+)", found["Examples"], re.DOTALL)
    assert code is not None
    for node in ast.walk(ast.parse(dedent(code[1]))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("branchlake_dagster"):
            source = next(one for one in DOORS if one.__name__ == node.module)
            assert {alias.name for alias in node.names} <= set(source.__all__)


FUNCTIONS = [getattr(door, name) for door, name in offered() if inspect.isfunction(getattr(door, name))]
METHODS = [
    method
    for owner in (testing.ThrowawayLake, testing.ThrowawayServer)
    for name, method in vars(owner).items()
    if inspect.isfunction(method) and not name.startswith("_")
]


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS], ids=lambda one: one.__qualname__)
def test_every_parameter_is_described(function: Callable[..., Any]) -> None:
    found = described(function)
    assert documented(found.get("Args", "")) == parameters(function)
    assert "Returns" in found or "Yields" in found or not parameters(function)


@pytest.mark.parametrize("name", ["BranchSparkResource", "NessieBranchIOManager"])
def test_every_field_of_a_resource_is_described(name: str) -> None:
    resource = getattr(root, name)
    fields = [field for field in vars(resource)["__annotations__"] if not field.startswith("_")]
    assert documented(described(resource)["Args"]) == fields


def test_former_names_are_todays_objects() -> None:
    assert {name: getattr(root, name) for name in root._FORMER_NAMES} == {
        "consume": root.read_changes,
        "published": root.newly_published,
        "unconsumed": root.consumer_backlog,
    }


def test_the_index_holds_every_name_with_its_summary() -> None:
    text, _, _ = INDEX.read_text().partition("## `from branchlake_dagster.errors import …`")  # test_errors.py
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, flags=re.MULTILINE)
    assert rows == [
        (name, (inspect.getdoc(getattr(door, name)) or "").splitlines()[0]) for door, name in offered()
    ]


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
    with raising(AttributeError, name="nonsense"):
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


def test_cleanup_and_backlogs_do_not_load_spark() -> None:
    script = (
        "import sys, branchlake_dagster.cleanup.jobs, branchlake_dagster.automation.backlog\n"
        "heavy = {'pyspark.sql', 'dagster_pyspark'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_pipeline_is_a_user_like_any_other() -> None:
    """Assets import from the root, as users do; commands and benchmarks are parts of the command line."""
    command_line = {ROOT / "sda" / "commands", ROOT / "sda" / "benchmarks"}
    wrong = [
        f"{path.relative_to(ROOT)}: {node.module}"
        for path in (ROOT / "sda").rglob("*.py")
        if path.parent not in command_line
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and str(node.module).startswith("branchlake_dagster.")
        and not str(node.module).startswith(("branchlake_dagster.sda", "branchlake_dagster.errors"))
    ]
    assert wrong == ["sda/__init__.py: branchlake_dagster.extras"]
