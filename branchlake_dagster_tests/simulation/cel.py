"""The part of CEL that our filters use: `in`, `==`, `!=`, `<`, `timestamp`, `contains`, `startsWith`, `matches`, `&&`, `||`, `!`, parentheses.

Nessie's errors are kept: a property that is not there is an error, which `&&` and `||` absorb only where
the other side decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

Variables = Mapping[str, Any]
Node = Callable[[Variables], Any]

_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>&&|\|\||==|!=|[<()\[\].!]))"
)


class CelSyntaxError(ValueError):
    """The expression is not of the part we know."""


class CelFailure(Exception):  # noqa: N818 - what the server calls a ScriptExecutionException
    """The expression fails on this value."""


@lru_cache(maxsize=4096)
def compiled(expression: str) -> Node:
    """A function from variables to the expression's value."""
    return _Parser(expression).whole()


def _pick(value: Any, name: str) -> Any:
    if name not in value:
        raise CelFailure(f"no such key: {name}")
    return value[name]


def _settled(left: Node, right: Node, decides: bool) -> Node:
    def run(variables: Variables) -> bool:
        failure: CelFailure | None = None
        for side in (left, right):
            try:
                if bool(side(variables)) == decides:
                    return decides
            except CelFailure as failed:
                failure = failed
        if failure:
            raise failure
        return not decides

    return run


_METHODS: Mapping[str, Callable[[str, str], bool]] = {
    "startsWith": str.startswith,
    "endsWith": str.endswith,
    "contains": str.__contains__,
    "matches": lambda text, pattern: re.search(pattern, text) is not None,
}


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        position = 0
        text = text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise CelSyntaxError(f"cannot read {text[position:]!r}")
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()

    def whole(self) -> Node:
        node = self._either()
        if self._tokens:
            raise CelSyntaxError(f"unexpected {self._tokens[0][1]!r}")
        return node

    def _next(self, *wanted: str) -> str | None:
        if self._tokens and self._tokens[0][1] in wanted and self._tokens[0][0] != "string":
            return self._tokens.pop(0)[1]
        return None

    def _must(self, wanted: str) -> None:
        if self._next(wanted) is None:
            raise CelSyntaxError(f"{wanted!r} is missing")

    def _take(self, kind: str) -> str:
        if not self._tokens or self._tokens[0][0] != kind:
            raise CelSyntaxError(f"a {kind} is missing")
        return self._tokens.pop(0)[1]

    def _either(self) -> Node:
        node = self._both()
        while self._next("||"):
            node = _settled(node, self._both(), True)
        return node

    def _both(self) -> Node:
        node = self._relation()
        while self._next("&&"):
            node = _settled(node, self._relation(), False)
        return node

    def _relation(self) -> Node:
        left = self._unary()
        sign = self._next("==", "!=", "<", "in")
        if sign is None:
            return left
        right = self._unary()
        if sign == "<":
            return lambda variables: left(variables) < right(variables)
        if sign == "in":
            return lambda variables: left(variables) in right(variables)
        return lambda variables: (left(variables) == right(variables)) is (sign == "==")

    def _unary(self) -> Node:
        if self._next("!"):
            inner = self._unary()
            return lambda variables: not inner(variables)
        return self._member()

    def _member(self) -> Node:
        node = self._primary()
        while True:
            if self._next("."):
                node = self._dotted(node, self._take("word"))
            elif self._next("["):
                node = self._indexed(node, self._take("string")[1:-1])
                self._must("]")
            else:
                return node

    def _dotted(self, node: Node, name: str) -> Node:
        if not self._next("("):
            return lambda variables: _pick(node(variables), name)
        if name not in _METHODS:
            raise CelSyntaxError(f"no method {name!r}")
        method, argument = _METHODS[name], self._either()
        self._must(")")
        return lambda variables: method(node(variables), argument(variables))

    def _indexed(self, node: Node, name: str) -> Node:
        return lambda variables: _pick(node(variables), name)

    def _primary(self) -> Node:
        if self._next("("):
            node = self._either()
            self._must(")")
            return node
        if self._tokens and self._tokens[0][0] == "string":
            text = self._take("string")[1:-1]
            return lambda _: text
        name = self._take("word")
        if name == "timestamp" and self._next("("):
            moment = self._either()
            self._must(")")
            return lambda variables: datetime.fromisoformat(moment(variables))
        if name in ("true", "false"):
            return lambda _: name == "true"
        return lambda variables: _pick(variables, name)
