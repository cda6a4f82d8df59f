"""The function and arguments of a check in pandera 0.35, which pandera does not export."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pandera.api.function_dispatch import Dispatcher

if TYPE_CHECKING:
    from pandera.api.checks import Check

__all__ = ["find_check_method", "get_builtin_check"]


def get_builtin_check(check: Check) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and arguments of a built-in check of pandera; None for a user's own check."""
    function: Any = check._check_fn
    return (str(function), check._check_kwargs) if isinstance(function, Dispatcher) else None


def find_check_method(check: Check) -> tuple[Callable[..., Any], Any] | None:
    """Return the user's function behind a `@pandera.check` method, and its model class, or None.

    None if the check is not such a method. pandera wraps the method in a closure over the model class and its
    own record of the check. If another version of pandera wraps it in another way, only the fast path is
    lost: the check then runs in pandera.
    """
    function: Any = check._check_fn
    if not inspect.isfunction(function):
        return None
    bound = inspect.getclosurevars(function).nonlocals
    method, model = getattr(bound.get("self"), "check_fn", None), bound.get("model_cls")
    return None if method is None or model is None else (method, model)
