"""`branchlake_dagster.errors`: every error that a user may catch, in one place."""

from __future__ import annotations

import ast
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from branchlake_dagster import errors
from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Terminal, Transient
from branchlake_dagster_tests.suite.raised import raising

PACKAGE = Path(errors.__file__).parent
INDEX = PACKAGE.parent / "docs" / "api.md"
INTERNAL = ("bench", "cli", "sda", "definitions", "launching")
"""Their errors end a command; the launcher catches its own."""


def kind(name: str) -> str:
    """What the caller may do next, in a word."""
    error = getattr(errors, name)
    return next(
        (one.__name__ for one in (Transient, Terminal, OutcomeUnknown) if issubclass(error, one)), "any"
    )


def summary(name: str) -> str:
    return (inspect.getdoc(getattr(errors, name)) or "").splitlines()[0].replace("|", "\\|")


def defined() -> dict[str, str]:
    """Each public error class of the library -> the module that defines it."""
    found = {}
    for module in pkgutil.walk_packages([str(PACKAGE)], "branchlake_dagster."):
        if module.name.split(".")[1] in INTERNAL or module.name.startswith("branchlake_dagster.testing"):
            continue
        for name, value in vars(import_module(module.name)).items():
            public = inspect.isclass(value) and issubclass(value, BranchlakeError) and name[0] != "_"
            if public and value.__module__ == module.name:
                assert name not in found, f"{name} is defined in {found[name]} and in {module.name}"
                found[name] = module.name
    return found


def test_every_public_error_is_exported() -> None:
    for name, module in defined().items():
        assert getattr(errors, name) is getattr(import_module(module), name)
    assert {name for names in errors._ERRORS_BY_MODULE.values() for name in names} < {*defined()}


@pytest.mark.parametrize("name", [name for names in errors._ERRORS_BY_MODULE.values() for name in names])
def test_an_error_says_what_may_be_done_next_and_has_a_docstring(name: str) -> None:
    error = getattr(errors, name)
    bases = [one for one in (Transient, Terminal, OutcomeUnknown) if issubclass(error, one)]
    assert len(bases) == 1 or (not bases and error.__subclasses__())
    assert inspect.getdoc(error) not in ("", inspect.getdoc(BranchlakeError))


def test_the_type_checker_sees_what_is_exported() -> None:
    tree = ast.parse(Path(errors.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in ast.walk(checked) if isinstance(node, ast.ImportFrom)]
    seen = {
        alias.name: str(node.module).removeprefix("branchlake_dagster.")
        for node in imports
        for alias in node.names
        if str(node.module).startswith("branchlake_dagster.")
    }
    assert seen == errors._MODULE_BY_ERROR
    assert {*seen} < {*errors.__all__}


def test_the_index_holds_every_error_with_its_summary() -> None:
    _, _, section = INDEX.read_text().partition("## `from branchlake_dagster.errors import …`")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", section, flags=re.MULTILINE)
    names = sorted({name for names in errors._ERRORS_BY_MODULE.values() for name in names})
    assert rows == [(name, kind(name), summary(name)) for name in names]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with raising(AttributeError, name="Nonsense"):
        errors.Nonsense  # noqa: B018


def test_an_error_is_imported_when_it_is_asked_for() -> None:
    code = (
        "import sys; from branchlake_dagster.errors import BranchlakeError\n"
        "assert 'branchlake_dagster.tables.errors' not in sys.modules\n"
        "from branchlake_dagster.errors import TableMissing\n"
        "assert TableMissing.__module__ == 'branchlake_dagster.tables.errors'\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_an_exported_error_survives_pickling() -> None:
    error = errors.TableMissing("No table.", table="shop.prices")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.table) == (errors.TableMissing, "shop.prices")
