"""docs/support.json says what is supported: its versions are those of the package, each promise has a test."""

from __future__ import annotations

import ast
import json
import re
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from branchlake_dagster.embedded.jars import ICEBERG_SPARK, NESSIE_SERVER
from branchlake_dagster.embedded.java import SPARK_RUNS_ON

ROOT = Path(__file__).parents[1]
MATRIX: dict[str, Any] = json.loads((ROOT / "docs" / "support.json").read_text())
SUPPORT = ("yes", "partly", "no", "untested")


@cache
def names_of_tests(path: Path) -> frozenset[str]:
    """The tests of a module, as pytest names them."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return frozenset(names)


@pytest.mark.parametrize("row", MATRIX["features"], ids=lambda row: f"{row['area']}: {row['feature']}")
def test_what_is_supported_has_a_test_and_what_is_limited_has_a_test_or_a_note(row: dict[str, str]) -> None:
    assert row.keys() <= {"area", "feature", "support", "test", "note"}
    assert row["support"] in SUPPORT
    if row["support"] == "partly":
        assert row["note"]
    if "test" in row:
        path, _, name = row["test"].partition("::")
        assert name in names_of_tests(ROOT / path)
    else:
        assert row["support"] in ("no", "untested") or row["note"]


def test_versions_are_those_of_the_package() -> None:
    declared = ConfigParser()
    declared.read(ROOT / "setup.cfg")
    options = declared["options"]
    requirements = dict(
        re.fullmatch(r"([\w-]+)(?:\[.+\])?(.+)", line.strip()).groups()
        for line in options["install_requires"].splitlines()
        if line.strip() and not line.strip().startswith("#")
    )
    locked = (ROOT / "branchlake_dagster" / "embedded" / "jars.sha256").read_text()
    (kafka,) = re.findall(r"kafka-server-([\d.]+)\.jar", locked)
    names = ("dagster", "pyspark", "pyiceberg", "pynessie", "pandera")
    assert MATRIX["versions"] == {
        "python": options["python_requires"],
        "java": f"{SPARK_RUNS_ON.start} to {SPARK_RUNS_ON.stop - 1}",
        **{name: requirements[name] for name in names},
        "nessie": NESSIE_SERVER.rev,
        "iceberg-spark-runtime": ICEBERG_SPARK.rev,
        "kafka": kafka,
    }


def as_page() -> str:
    """docs/support.md, made of the file."""
    versions = "\n".join(f"| {name} | {version} |" for name, version in MATRIX["versions"].items())
    rows = "\n".join(
        f"| {row['area']} | {row['feature']} | {row['support']} | {row.get('note', '')} |"
        for row in MATRIX["features"]
    )
    return (
        "# Support\n\n"
        "Which versions and features are supported. The tests run with these versions. *Untested* means that it may\n"
        "work, but nobody has tried. [support.json](support.json) has the same for programs, and the test of each row.\n\n"
        f"| component | versions |\n|---|---|\n{versions}\n\n"
        f"| area | feature | supported | note |\n|---|---|---|---|\n{rows}\n"
    )


def test_the_page_is_made_of_the_file() -> None:
    """To write it anew: `python -m branchlake_dagster_tests.test_support_matrix`."""
    assert (ROOT / "docs" / "support.md").read_text() == as_page()


if __name__ == "__main__":
    (ROOT / "docs" / "support.md").write_text(as_page())
