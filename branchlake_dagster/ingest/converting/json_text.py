"""What the text of a JSON value shows without parsing it, as Spark expressions."""

from __future__ import annotations

from pyspark.sql import Column as Expression
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

JSON_STRING = r'"(?:[^"\\]|\\.)*+"'
"""A regular expression: a string with its quotes. It never backtracks."""
DEEPEST = 200
"""Levels of objects and lists that Spark's functions on types of values follow with the stack of any JVM."""


def is_json_object(text: Expression) -> Expression:
    """Whether a text that is known to be JSON holds an object, by its first character; null stays null."""
    return text.rlike(r"^[ \t\r\n]*\{")


def is_deep_json(text: Expression, levels: int = DEEPEST) -> Expression:
    """Whether a text has more than so many objects and lists inside each other; null has none.

    `schema_of_variant` calls itself for each level. A value of a thousand levels, five kilobytes, exhausts
    the stack of an executor's thread, which Spark takes for a failure of the executor and ends it.

    A text with few brackets costs one replacement. Of any other the pairs of brackets without anything
    inside are taken away, level by level.
    """
    openings = F.length(F.regexp_replace(text, r"[^\[{]", ""))
    brackets = F.regexp_replace(F.regexp_replace(text, JSON_STRING, ""), r"[^\[\]{}]", "")
    rest = F.reduce(
        F.sequence(F.lit(1), F.lit(levels)),
        brackets,
        lambda left, _: F.regexp_replace(left, r"\[\]|\{\}", ""),
    )
    return F.coalesce(F.when(openings > levels, rest != ""), F.lit(False))
