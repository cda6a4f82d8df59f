"""Assertions about errors by type and fields, so that their sentences can be rewritten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

_Error = TypeVar("_Error", bound=BaseException)


@contextmanager
def raising(kind: type[_Error], *names: str | int, **fields: Any) -> Iterator[pytest.ExceptionInfo[_Error]]:
    """Require an error of exactly the class `kind`, not of a subclass, with these attributes.

    `names` are names and numbers that the message must contain: a table, a setting, an offset, a command to
    run. Other words of the message are not tested.

    Examples:
        .. code-block:: python

            with raising(ConfigurationError, "BRANCHLAKE_NESSIE_URI", reason="unknown_setting"):
                Settings.from_environment()

    """
    __tracebackhide__ = True
    with pytest.raises(kind) as caught:
        yield caught
    require(caught.value, kind, *names, **fields)


def require(error: BaseException | None, kind: type[BaseException], *names: str | int, **fields: Any) -> None:
    """Require the same of an error that was already caught, for example the cause of another one."""
    __tracebackhide__ = True
    assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
    assert {name: getattr(error, name) for name in fields} == fields
    assert [name for name in map(str, names) if name not in str(error)] == [], str(error)
