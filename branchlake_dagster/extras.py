"""Checks for the optional packages of the extras, with the command that installs a missing one."""

from __future__ import annotations

from importlib.util import find_spec

from branchlake_dagster.errors import ConfigurationError

DISTRIBUTION = "branchlake_dagster"


class MissingExtra(ConfigurationError, ImportError):  # noqa: N818 - named like the other outcomes
    """A package of an extra is not installed. `hint` contains the command that installs it."""


def require_modules(extra: str, *modules: str, needed_by: str) -> None:
    """Raise MissingExtra if a module of `modules` is not installed. Imports none of them.

    Args:
        extra: The extra in setup.cfg that installs the modules.
        modules: Importable module names.
        needed_by: The feature that needs the modules, as the subject of the message.
    """
    missing_modules = [name for name in modules if find_spec(name) is None]
    if missing_modules:
        raise MissingExtra(
            f"{needed_by} needs {' and '.join(missing_modules)}, which is not installed.",
            hint=f"Install the extra: pip install '{DISTRIBUTION}[{extra}]'.",
            subject=", ".join(missing_modules),
        )
