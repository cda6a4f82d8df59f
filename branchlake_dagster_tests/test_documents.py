"""README and docs/: links lead somewhere, code names what exists, commands and paths are those of the product."""

from __future__ import annotations

import ast
import json
import re
from configparser import ConfigParser
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import dagster as dg
import pytest

from branchlake_dagster.cli.main import main
from branchlake_dagster_tests.suite.command_line import subcommands

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGES = ROOT / "branchlake_dagster"
CONFIGURATION = sorted(
    [
        *(ROOT / name for name in ("workspace.yaml", "pyproject.toml", "setup.cfg", "Makefile")),
        *(path for path in (ROOT / "deploy").rglob("*") if path.is_file()),
        *(
            path
            for path in (PACKAGES / "cli" / "template").rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        ),
        PACKAGES / "cli" / "dagster_home.py",  # writes dagster.yaml
    ]
)
LARGEST_PICTURE = 200_000
"""Bytes."""

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The fragments of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere: no such file, or no such heading in it."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        found = page.parent / name if name else page
        if not found.exists() or (fragment and fragment not in anchors(found)):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n[a](#one-two) [b](#three) [c](other.md) [d](https://example.org)\n")
    assert dead_links(page) == ["#three", "other.md"]


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        linked = re.findall(r"\]\(([^)#\s:]+)[^)]*\)", prose(page))
        waiting += [(page.parent / target).resolve() for target in linked]
    assert set(DOCUMENTS) - reached == set()


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_imports_of_the_examples_exist(page: Path) -> None:
    for language, text in _FENCED.findall(page.read_text()):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES.name):
                module = import_module(node.module or "")
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{node.module} has no {', '.join(missing)}"


_PATH = re.compile(rf"\b{PACKAGES.name}(?:[.:][A-Za-z_]\w*)+")
_CLASS = re.compile(r"^ *module: *([\w.]+)\n *class: *(\w+)", re.MULTILINE)
"""As Dagster's `dagster.yaml` names a run launcher, a run coordinator, a storage."""
STORED_PATHS = (
    "branchlake_dagster.WarmRunLauncher",  # run_launcher of dagster.yaml
    "branchlake_dagster.cli:main",  # the installed command
    "branchlake_dagster.components",  # entry point of dagster-dg
    "branchlake_dagster.components.BranchlakeComponent",  # type of defs.yaml
    "branchlake_dagster.definitions",  # workspace.yaml, and the origins of runs in Dagster's database
    "branchlake_dagster.catalog.NessieCatalog",  # py-catalog-impl of .pyiceberg.yaml
    "branchlake_dagster.lakehouse.catalog.NessieCatalog",  # the same, written before an upgrade
    "branchlake_dagster.lakehouse.python_workers.daemon.main",  # in Spark servers started before an upgrade
    "branchlake_dagster.testing",  # tests of users
    "branchlake_dagster.testing.fixtures",  # pytest_plugins of users
)
"""Module paths in files of users and in their Dagster homes. They stay importable whatever becomes of the modules: one
that moves leaves a module behind that imports it from its new home."""


def paths_in(text: str) -> set[str]:
    """The dotted paths of this package's modules and names in a text that is not Python of this package."""
    found = {one.rstrip(":.") for one in _PATH.findall(text)}
    return found | {f"{module}.{name}" for module, name in _CLASS.findall(text)}


def resolve(path: str) -> object:
    """The module or the name in a module at a dotted path, `module:name` too. Raises ImportError, AttributeError."""
    parts = re.split("[.:]", path)
    for number in range(len(parts), 0, -1):
        name = ".".join(parts[:number])
        try:
            found: object = import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            continue
        for part in parts[number:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path, name=path)


@pytest.mark.parametrize("page", [*DOCUMENTS, *CONFIGURATION], ids=lambda page: str(page.relative_to(ROOT)))
def test_module_paths_are_importable(page: Path) -> None:
    text = page.read_text()
    if page.suffix == ".py":  # what it writes, and not what it imports
        strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        text = "\n".join(one for one in strings if isinstance(one, str))
    for path in sorted(paths_in(text)):
        resolve(path)


def test_module_paths_in_dagsters_configuration_are_found() -> None:
    text = "run_launcher:\n  module: branchlake_dagster\n  class: WarmRunLauncher\n"
    assert paths_in(text) == {"branchlake_dagster.WarmRunLauncher"}
    text = (
        "- python_module:\n    module_name: branchlake_dagster.definitions\nx = branchlake_dagster.cli:main\n"
    )
    assert paths_in(text) == {"branchlake_dagster.definitions", "branchlake_dagster.cli:main"}
    with pytest.raises(ImportError):
        resolve("branchlake_dagster_x.gone")
    with pytest.raises(AttributeError):
        resolve("branchlake_dagster.testing.gone")


@pytest.mark.parametrize("path", STORED_PATHS)
def test_module_paths_that_users_have_stored_stay_importable(path: str) -> None:
    resolve(path)


def test_stored_module_paths_are_listed() -> None:
    """A path that our own configuration or a template brings to users is one that they store."""
    brought = {path for page in CONFIGURATION if page.suffix != ".py" for path in paths_in(page.read_text())}
    own = {"branchlake_dagster.cli.lock_jars"}  # of our Makefile alone
    assert {path for path in brought if ".egg" not in path} - own - {*STORED_PATHS} == set()


def code_locations() -> list[Any]:
    """The examples that end in a whole code location."""
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in DOCUMENTS
        for number, (language, text) in enumerate(_FENCED.findall(page.read_text()))
        if language == "python" and re.search(r"^defs = ", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("text", code_locations())
def test_an_example_of_a_code_location_loads(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("NESSIE", "https://nessie.example.org/api/v2")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(text, "example", "exec", dont_inherit=True), names)
    dg.Definitions.validate_loadable(names["defs"])


def test_the_architecture_describes_each_package() -> None:
    text = prose(ROOT / "docs" / "architecture.md")
    packages_text = text[text.index("## Packages") : text.index("## The life of a run")]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ", packages_text, re.MULTILINE)
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    packages = {path.parent.name for path in PACKAGES.glob("*/__init__.py")}
    modules = {path.stem for path in PACKAGES.glob("[a-z]*.py")}
    assert packages <= described <= packages | modules


@pytest.mark.parametrize("page", ["architecture.md", "modules.md"])
def test_the_named_modules_exist(page: str) -> None:
    folder = PACKAGES
    for name in re.findall(r"`([\w/]+\.py)`", prose(ROOT / "docs" / page)):
        if "/" in name:
            folder = (PACKAGES / name).parent
        # A bare name stands beside the one before it, or at a root.
        places = (folder / Path(name).name, PACKAGES / name, ROOT / "branchlake_dagster_tests" / name)
        assert any(place.exists() for place in places), name


def commands(group: click.Group, path: str) -> list[str]:
    found = []
    for name, command in subcommands(group):
        if command.hidden:  # a name of an earlier version
            continue
        found.append(f"{path} {name}")
        if isinstance(command, click.Group):
            found += commands(command, f"{path} {name}")
    return found


def test_every_command_has_its_row() -> None:
    rows = (ROOT / "docs" / "commands.md").read_text()
    groups = {"branchlake bench"}  # its commands have the rows
    missing = [one for one in commands(main, "branchlake") if f"| `{one}" not in rows and one not in groups]
    assert missing == []


def test_every_extra_has_its_row() -> None:
    declared = ConfigParser()
    declared.read(ROOT / "setup.cfg")
    rows = set(re.findall(r"^\| `\[(\w+)\]` \|", (ROOT / "docs" / "deployment.md").read_text(), re.MULTILINE))
    assert rows == set(declared["options.extras_require"]) - {"dev"}


def sentences_of_the_package() -> str:
    """Every string of the package's code, one below the other; an f-string as the texts between its values."""
    return "\n".join(
        node.value
        for path in PACKAGES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def documented_messages(page: Path) -> list[str]:
    """The first cells, in backticks, of the page's tables whose first column is a message or a reason."""
    tables = re.findall(r"^\| (?:message|reason) \|.*\n\|-.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return [
        message
        for table in tables
        for row in table.splitlines()
        for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]


def test_the_messages_of_the_operations_page_are_those_of_the_product() -> None:
    """A sentence may be improved at any time, and then on the page too: its reader searches for it."""
    printed = sentences_of_the_package()
    messages = documented_messages(ROOT / "docs" / "operations.md")
    assert len(messages) > 80
    missing = {
        message: part
        for message in messages
        for part in re.sub(r"^\w+: ", "", message).split("…")
        if part.strip(" .,:;()") not in printed
    }
    assert missing == {}


def missing_tests(page: Path) -> list[str]:
    """The tests named as `file.py::test_name` that do not exist."""
    missing = []
    for file, name in re.findall(r"`([\w/]+\.py)::(test_\w+)`", prose(page)):
        path = ROOT / "branchlake_dagster_tests" / file
        if not path.exists() or not re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE):
            missing.append(f"{file}::{name}")
    return missing


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_named_tests_exist(page: Path) -> None:
    assert missing_tests(page) == []


def test_a_missing_test_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`test_documents.py::test_a_missing_test_is_found` `test_documents.py::test_b` `c.py::test_c`\n"
    )
    assert missing_tests(page) == ["test_documents.py::test_b", "c.py::test_c"]


def test_each_measured_figure_has_its_setting() -> None:
    history = json.loads((ROOT / "docs" / "benchmarks-history.json").read_text())
    fields = {"date", "commit", "benchmark", "setting", "measure", "value", "unit"}
    for figure in history["figures"]:
        assert fields <= figure.keys() <= fields | {"note"}, figure
        assert isinstance(figure["value"], int | float), figure
        date.fromisoformat(figure["date"])


def test_pictures_are_small() -> None:
    large = [path for path in (ROOT / "docs").rglob("*.png") if path.stat().st_size > LARGEST_PICTURE]
    assert large == []
