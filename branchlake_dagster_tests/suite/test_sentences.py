"""Tests prove types, fields and codes, so that every sentence of the product can be rewritten.

An error is expected with `suite.raised.raising`, which takes its class, its fields, and names that its text
must hold. Reports have codes, metadata or JSON beside their text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

PATTERNS = {
    "catalog/test_tables.py": "PyIceberg's ValueError, which has no class of its own",
    "nessie/test_simulated_server.py": "Nessie's answers, whose errorCode is the same for all of them",
    "nessie/test_server.py": "Nessie's answers, whose errorCode is the same for all of them",
    "spark/test_lost_server.py": "PySpark's warning, which has no class of its own",
}
"""Files that may expect an error or warning by a pattern, and why."""

QUOTED = {
    "sda/test_conjunctions.py": "a name of an object, not a sentence",
    "catalog/test_tables.py": "messages of commits, which are stored on main",
    "launching/test_leaving.py": "an error that the test itself raises",
    "suite/test_absent.py": "a command to run",
}
"""Files that may compare texts of three and more words, and why."""

_RAISING = {"raises", "warns"}
_TEXTS = {"output", "stdout", "stderr", "message", "hint", "args"}
"""Attributes of errors and of commands that hold sentences."""
_WORDS = 3


def patterns(tree: ast.AST) -> Iterator[int]:
    """Lines that expect an error or a warning by a pattern."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RAISING:
            yield from (node.lineno for keyword in node.keywords if keyword.arg == "match")


def quotes(tree: ast.AST) -> Iterator[int]:
    """Lines that require a sentence in the text of an error, or in what a command has written.

    What must not be in a text, as a secret, is no such line.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare) or any(isinstance(one, ast.NotIn) for one in node.ops):
            continue
        sides = [node.left, *node.comparators]
        if any(map(_is_text, sides)) and any(map(_is_sentence, sides)):
            yield node.lineno


def _is_text(side: ast.AST) -> bool:
    for node in ast.walk(side):
        if isinstance(node, ast.Attribute) and node.attr in _TEXTS:
            return True
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "str":
            return any(isinstance(one, ast.Attribute) and one.attr == "value" for one in ast.walk(node))
    return False


def _is_sentence(side: ast.AST) -> bool:
    """Whether a literal of several words is in it. Of an f-string its own words count, not the values.

    A command to run, as `branchlake reap --branch x`, is no sentence.
    """
    return any(
        len(text.split()) >= _WORDS and not text.startswith("branchlake ")
        for text in map(_literal, ast.walk(side))
    )


def _literal(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return " ".join(str(one.value) for one in node.values if isinstance(one, ast.Constant))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _offences(kind: object, allowed: dict[str, str]) -> list[str]:
    assert callable(kind)
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        lines = list(kind(ast.parse(path.read_text())))
        if name in allowed:
            assert lines, f"{name} needs no exception any more"
        else:
            found += [f"{name}:{line}" for line in lines]
    return found


def test_no_error_is_expected_by_a_pattern() -> None:
    assert _offences(patterns, PATTERNS) == []


def test_no_sentence_of_an_error_or_a_command_is_required() -> None:
    assert _offences(quotes, QUOTED) == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pytest.raises(ValueError, match='a')", (1, 0)),
        ("pytest.raises(ValueError)", (0, 0)),
        ("assert 'the table is gone' in str(caught.value)", (0, 1)),
        ("assert caught.value.message == 'the table is gone'", (0, 1)),
        ("assert f'the table {name} is gone' in done.output", (0, 1)),
        ("assert f'{name} {table}' in done.output", (0, 0)),
        ("assert f'branchlake set-aside retry {run}' in done.output", (0, 0)),
        ("assert 'a very secret word' not in done.output", (0, 0)),
        ("assert 'BRANCHLAKE_KAFKA_CA' in str(caught.value)", (0, 0)),
    ],
)
def test_what_is_found(code: str, expected: tuple[int, int]) -> None:
    tree = ast.parse(code)
    assert (len(list(patterns(tree))), len(list(quotes(tree)))) == expected
