"""The errors of backups and restores."""

# The class names are terms of the design without the suffix Error.
# ruff: noqa: N818

from __future__ import annotations

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal


class BackupFailed(BranchlakeError, Terminal):
    """No backup was made, and the lake was not changed."""


class BackupDamaged(BranchlakeError, Terminal):
    """The backup is incomplete, or a table in it cannot be read."""


class NotBackedUpHere(ConfigurationError):
    """A copy of folders would not contain the lake, because parts of it are on other servers."""


class RestoreRefused(ConfigurationError):
    """The backup cannot be restored here now. Nothing was changed."""
