"""Prevents commands that a test runs in the repository's folder from loading the repository's own code location.

Its settings are read when the process first imports it, so later tests would use the lake of an earlier test. A
command in another process or another folder still loads the code location that it finds.
"""

from __future__ import annotations

from pathlib import Path

from branchlake_dagster.cli import command_settings

REPOSITORY = Path(__file__).parents[2]


def ignore_own_project() -> None:
    """From now on, commands of this process do not treat the repository's folder as a project."""
    project_files = command_settings.find_project_files
    command_settings.find_project_files = lambda: [] if Path.cwd() == REPOSITORY else project_files()
