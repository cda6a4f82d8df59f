"""No identifier and no docstring of the library has a word that only its authors would understand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "branchlake_dagster"
TESTS = Path(__file__).parents[1]

WORDS_OUT = frozenset(
    {"told", "tell", "tells", "letters", "standing", "beyond", "aside", "anchor", "floor", "mine", "theirs"}
)
"""Each has a term of the field: reported, dead letters, progress, unpublished snapshots, common position, …"""
PHRASES = ("dead_letters", "set_aside")
"""Terms of the field, and a stored value, that have one of these words in them."""
ALLOWED = {
    "bench/incremental_feed.py": {"floor"},  # a function of Spark
    "checks/counting.py": {"floor"},  # the same
    "internals/manifest_files.py": {"tell"},  # a method of a decoder of PyIceberg
}


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name of all that is defined or used."""
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name


PROSE_OUT = re.compile(r"\b(told|tells?|taken back|given back|by hand|put back|foreign hands)\b", re.I)
"""Words and phrases for which `docs/` and docstrings have terms: reported, revoked, reprocessed, …"""


OUTSIDE_OUT = re.compile(r"_(by_hand|put_back|taken_back|given_back|foreign_hands)(_|$)")
"""Phrases that names of tests write with underscores."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring, also of constants and fields, without code in backticks."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                yield each.lineno, re.sub(r"`[^`]*`", "", str(each.value.value))


def words_out(name: str) -> set[str]:
    """The words of an identifier that the glossary takes out."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    for phrase in PHRASES:
        name = name.replace(phrase, "")
    return WORDS_OUT & set(name.split("_"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dead_letters", set()),
        ("_waiting_letters", {"letters"}),
        ("ToldLetters", {"told", "letters"}),
        ("main_change", set()),
        ("determine", set()),
    ],
)
def test_words_of_identifiers(name: str, expected: set[str]) -> None:
    assert words_out(name) == expected


def test_no_identifier_has_a_word_that_is_out() -> None:
    found = {
        f"{path.relative_to(LIBRARY)}:{line}: {name}"
        for path in LIBRARY.rglob("*.py")
        if "sda" not in path.parts
        for line, name in identifiers(ast.parse(path.read_text()))
        if words_out(name) - ALLOWED.get(path.relative_to(LIBRARY).as_posix(), set())
    }
    assert sorted(found) == []


def test_no_docstring_has_a_word_that_is_out() -> None:
    found = {
        f"{path.relative_to(LIBRARY)}:{line}: {hit[0]}"
        for path in LIBRARY.rglob("*.py")
        if "sda" not in path.parts
        for line, text in docstrings(ast.parse(path.read_text()))
        for hit in PROSE_OUT.finditer(text)
    }
    assert sorted(found) == []


def test_no_name_of_a_test_has_a_word_that_is_out() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{node.lineno}: {node.name}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if words_out(node.name) - {"mine"} or OUTSIDE_OUT.search(node.name)
    }
    assert sorted(found) == []
