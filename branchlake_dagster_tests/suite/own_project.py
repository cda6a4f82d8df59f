"""Commands that a test invokes in the repository's folder do not find the repository's own code location.

Its settings are those of the moment at which the process imported it first, so every test would work with the
lake of an earlier one. A command in a process of its own, or in a folder of the test's, finds what is there.
"""

from __future__ import annotations

from pathlib import Path

from branchlake_dagster.cli import command_settings

REPOSITORY = Path(__file__).parents[2]


def ignore_own_project() -> None:
    """From now on the folder of the repository is not a project for commands of this process."""
    project_files = command_settings.find_project_files
    command_settings.find_project_files = lambda: [] if Path.cwd() == REPOSITORY else project_files()
