"""`branchlake new`: a Dagster project whose assets are written on branches, checked and published."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError

_NAME = "PROJECT"
"""Stands for the project's name in the template's paths and texts."""
_SUFFIX = ".template"
"""Of the template's files, so that no tool takes them for this package's own."""


def new_project(target: Path) -> list[Path]:
    """Make a project in the folder `target`, named after it; the files that were made.

    Raises ConfigurationError when the folder holds something already, or its name is no Python name.
    """
    name = re.sub(r"[-. ]", "_", target.name)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigurationError(
            f"{target.name!r} cannot name a Python package.", hint="Use letters, digits and _."
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} is there already.", hint="Name a folder that is new or empty.")
    root = Path(str(files("branchlake_dagster.cli") / "template"))
    made = []
    for source in sorted(root.rglob(f"*{_SUFFIX}")):
        place = str(source.relative_to(root)).removesuffix(_SUFFIX).replace(_NAME, name)
        path = target / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text().replace(_NAME, name))
        made.append(path)
    return made
