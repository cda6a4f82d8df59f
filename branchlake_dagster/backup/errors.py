"""The errors of backups and restores."""

# The class names are terms of the design without the suffix Error.
# ruff: noqa: N818

from __future__ import annotations

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal


class BackupFailed(BranchlakeError, Terminal):
    """No backup was made, and the lake was not changed."""


class BackupDamaged(BranchlakeError, Terminal):
    """The backup is incomplete, has no table of `main`, or its record or a table in it cannot be read."""


class NotBackedUpHere(ConfigurationError):
    """The lake cannot be copied as folders: parts of it are on other servers, or its folders are nested."""


class RestoreRefused(ConfigurationError):
    """The backup cannot be restored here now. Nothing was changed."""
