"""`branchlake new`: a Dagster project whose assets are written on branches, checked and published."""

from __future__ import annotations

import json
import keyword
import re
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

from branchlake_dagster.cli.dagster_home import prepare_home
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.extras import DISTRIBUTION

_NAME = "PROJECT"
"""Stands for the project's name in the template's paths and texts."""
_REQUIREMENT = "BRANCHLAKE_REQUIREMENT"
_DAGSTER_HOME = "PROJECT_DAGSTER_HOME"
_SUFFIX = ".template"
"""Of the template's files, so that no tool takes them for this package's own."""
_EXTRAS = "embedded,query,ui"


def new_project(target: Path, *, requirement: str | None = None) -> list[Path]:
    """Make a project in the folder `target`, named after it; the files that were made.

    `requirement` is how it depends on this package (None: on the one that runs now, see
    `requirement_of`). Dagster's home is the folder `.branchlake/dagster` of the project; it is made too, with
    the `dagster.yaml` that `branchlake up` writes, so that `dg dev` may come first.
    Raises ConfigurationError when the folder holds something already, or its name is no Python name.
    """
    name = re.sub(r"[-. ]", "_", target.name)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigurationError(
            f"{target.name!r} cannot name a Python package.",
            hint="Use letters, digits and _.",
            reason="package_name",
            subject=target.name,
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(
            f"{target} is there already.",
            hint="Name a folder that is new or empty.",
            reason="folder_exists",
            subject=str(target),
        )
    home = target.absolute() / ".branchlake" / "dagster"
    texts = {
        _DAGSTER_HOME: str(home),
        _REQUIREMENT: requirement or installed_requirement(),
        _NAME: name,
    }
    root = Path(str(files("branchlake_dagster.cli") / "template"))
    made = []
    for source in sorted(root.rglob(f"*{_SUFFIX}")):
        place = str(source.relative_to(root)).removesuffix(_SUFFIX).replace(_NAME, name)
        path = target / place
        path.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text()
        for placeholder, value in texts.items():
            text = text.replace(placeholder, value)
        path.write_text(text)
        made.append(path)
    home.mkdir(mode=0o700, parents=True)
    prepare_home(home)
    return made


def installed_requirement() -> str:
    """How a project depends on this very package, as it was installed."""
    found = distribution(DISTRIBUTION)
    return requirement_of(found.read_text("direct_url.json"), found.version)


def requirement_of(direct_url: str | None, version: str) -> str:
    """A dependency on this package for `pyproject.toml`, which pip can resolve on this machine.

    `direct_url` is the content of pip's `direct_url.json` (PEP 610): where the package was installed from a
    clone or a wheel. Without one it came from an index, and its version is enough.
    """
    if direct_url is None:
        return f"{DISTRIBUTION}[{_EXTRAS}]>={version}"
    origin = json.loads(direct_url)
    vcs = origin.get("vcs_info")
    url = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else origin["url"]
    return f"{DISTRIBUTION}[{_EXTRAS}] @ {url}"
