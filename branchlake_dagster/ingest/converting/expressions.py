"""Spark expressions out of many parts, and reasons why there is no row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_

from pyspark.sql import Column as Expression
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects


def seldom(condition: Expression, value: Expression, made: Callable[[Expression], Expression]) -> Expression:
    """What `made` makes of the value where the condition holds, else null; outside Spark's compiled code.

    What is compiled together is one method, and one of more than 8,000 bytes Java leaves to its interpreter:
    with the words for every bad field in it, records that are all good took twice as long. Spark evaluates a
    lambda node by node, only where it has to.
    """
    return F.when(condition, bound(value, made))


def first_of(kind: str, said: Sequence[tuple[Expression, str]]) -> list[tuple[Expression, Expression]]:
    """One branch of a `case` for many conditions, each with its words: those of the first that holds."""
    if not said:
        return []
    words = F.coalesce(*(F.when(condition, text) for condition, text in said))
    return [(any_of(one for one, _ in said), bound(F.lit(kind), lambda told: because(told, words)))]


def matches_whole(text: Expression, pattern: str) -> Expression:
    r"""Whether a regular expression matches all of a text; null where the text is null.

    Java's ``$`` also matches before a line break at the end: ``a\n`` was taken for the route ``a``.
    """
    return text.rlike(whole(pattern))


def whole(pattern: str) -> str:
    """The regular expression that matches a text from its first to its last character, in Java."""
    return rf"\A(?:{pattern})\z"


def any_of(conditions: Iterable[Expression]) -> Expression:
    """Whether one of them holds; null is no."""
    return balanced(or_, [F.coalesce(one, F.lit(False)) for one in conditions], F.lit(False))


def balanced(
    join: Callable[[Expression, Expression], Expression], parts: Sequence[Expression], nothing: Expression
) -> Expression:
    """All of them joined two by two, `nothing` where there are none.

    One after the other they would be as deep as they are many: of more than fifty tables or partitions the
    message to Spark is refused (a protocol buffer's limit of a hundred levels).
    """
    found = list(parts)
    while len(found) > 1:
        found = [reduce(join, found[at : at + 2]) for at in range(0, len(found), 2)]
    return found[0] if found else nothing


def bound(value: Expression, made: Callable[[Expression], Expression]) -> Expression:
    """What `made` makes of a value that is computed once, however often it names it; never compiled."""
    return F.transform(F.array(value), made)[0]


def because(kind: Expression | str, detail: Expression | str) -> Expression:
    """A reason, as `Fitted.why` has it."""
    said, text = (F.lit(one) if isinstance(one, str) else one for one in (kind, detail))
    return F.struct(said.alias("kind"), text.alias("detail"))


def no_reason() -> Expression:
    """None, in the type of a reason."""
    return F.lit(None).cast("struct<kind: string, detail: string>")


def case(branches: Sequence[tuple[Expression, Expression]], otherwise: Expression) -> Expression:
    """CASE WHEN with any number of branches."""
    if not branches:
        return otherwise
    (condition, value), rest = branches[0], branches[1:]
    return reduce(lambda found, one: found.when(*one), rest, F.when(condition, value)).otherwise(otherwise)
