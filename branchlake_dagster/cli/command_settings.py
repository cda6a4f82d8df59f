"""Load the settings of a command from the environment or from a code location.

This module imports Dagster only if a code location is named, so that other commands start faster.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.settings import Settings

if TYPE_CHECKING:
    from branchlake_dagster.cli.location import LoadedLocation

ENVIRONMENT = "the environment"
MODULE_HELP = "The module with your Definitions; default: those of the project's files."
_FILES = ("dg.toml", "pyproject.toml", "workspace.yaml", "workspace.yml")
"""Files that name code locations, in the order in which dg and Dagster look for them."""
_LAKE_VARIABLES = ("BRANCHLAKE_NESSIE_URI", "BRANCHLAKE_STATE_DIR")
"""Variables that name a lake."""
_TABLES = ("[tool.dagster", "[tool.dg")
"""Prefixes of the tables in a pyproject.toml that may name code locations."""


@dataclass(frozen=True)
class CommandSettings:
    """The settings of a command with their source.

    `source` is `the environment`, or the lake's resource key and its code location. `locations` are the
    loaded code locations that use these settings. `trouble` describes code locations that could not be
    loaded.
    """

    settings: Settings
    source: str = ENVIRONMENT
    locations: tuple[LoadedLocation, ...] = ()
    trouble: str | None = None

    @property
    def description(self) -> str:
        """The source of the settings and the errors of code locations, for a message."""
        return f"{self.source}; {self.trouble}" if self.trouble else self.source

    def require_named_lake(self) -> Settings:
        """Return the settings for a command that changes the lake.

        Raises:
            ConfigurationError: A code location could not be loaded, and the environment names no lake. The
                default lake may be another one than that of the code location.
        """
        if self.trouble and self.source == ENVIRONMENT and not any(map(os.environ.get, _LAKE_VARIABLES)):
            raise ConfigurationError(
                f"The lake to change is unknown: {self.trouble}.",
                hint=f"Correct the code location, or name the lake with {' or '.join(_LAKE_VARIABLES)}.",
                reason="lake_unknown",
            )
        return self.settings


def find_project_files() -> list[Path]:
    """Return the files of the working folder that may name code locations; empty outside a project."""
    paths = (Path(name) for name in _FILES)
    return [
        path for path in paths if path.is_file() and (path.suffix != ".toml" or _may_name_locations(path))
    ]


def _may_name_locations(path: Path) -> bool:
    if path.name == "dg.toml":
        return True
    content = path.read_text(encoding="utf-8", errors="replace")
    return any(table in content for table in _TABLES)


def load_command_settings(module: str | None) -> CommandSettings:
    """Load the settings of a module's lake, of the project in the working folder, or of the environment.

    Imports the code location and prints the source of the settings to standard error. Outside a project and
    without `module`, only reads the environment.

    Args:
        module: A module with `Definitions`, as for `dagster dev -m`. If it is None, `dg.toml`,
            `pyproject.toml` or `workspace.yaml` of the working folder names the code locations.

    Returns:
        The settings and their source. The settings come from the environment if the code locations have no
        lake or cannot be loaded.

    Raises:
        ConfigurationError: `module` cannot be loaded, or there are several lakes to choose from.
    """
    files = [] if module is not None else find_project_files()
    if module is None and not files:
        return CommandSettings(Settings())
    from branchlake_dagster.cli import location

    loaded_settings = (
        location.load_module_settings(module) if module is not None else location.load_project_settings(files)
    )
    if loaded_settings.source != ENVIRONMENT or loaded_settings.trouble:
        click.echo(f"settings: {loaded_settings.description}", err=True)
    return loaded_settings
