"""Packages that only a part of the product needs, and what to install when one is asked for and absent."""

from __future__ import annotations

from importlib.util import find_spec

from branchlake_dagster.errors import ConfigurationError

DISTRIBUTION = "branchlake_dagster"


class MissingExtra(ConfigurationError, ImportError):  # noqa: N818 - named like the other outcomes
    """A package of an extra is not installed; `hint` holds the command that installs it."""


def require_modules(extra: str, *modules: str, needed_by: str) -> None:
    """Raise MissingExtra unless every one of `modules` can be imported; imports none of them.

    `extra` is one of the extras in setup.cfg, `needed_by` what needs it, as the start of a sentence.
    """
    missing_modules = [name for name in modules if find_spec(name) is None]
    if missing_modules:
        raise MissingExtra(
            f"{needed_by} needs {' and '.join(missing_modules)}, which is not installed.",
            hint=f"Install the extra: pip install '{DISTRIBUTION}[{extra}]'.",
            subject=", ".join(missing_modules),
        )
