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

_NAME_PLACEHOLDER = "PROJECT"
"""Stands for the project's name in the template's paths and texts."""
_REQUIREMENT_PLACEHOLDER = "BRANCHLAKE_REQUIREMENT"
_HOME_PLACEHOLDER = "PROJECT_DAGSTER_HOME"
_SUFFIX = ".template"
"""Of the template's files, so that no tool takes them for this package's own."""
_EXTRAS = "embedded,query,ui"


def create_project(target: Path, *, requirement: str | None = None) -> list[Path]:
    """Make a project in the folder `target`, named after it; the files that were made.

    `requirement` is how it depends on this package (None: on the one that runs now, see
    `format_requirement`). Dagster's home is the folder `.branchlake/dagster` of the project; it is made too,
    with the `dagster.yaml` that `branchlake up` writes, so that `dg dev` may come first.
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
    replacements = {
        _HOME_PLACEHOLDER: str(home),
        _REQUIREMENT_PLACEHOLDER: requirement or format_own_requirement(),
        _NAME_PLACEHOLDER: name,
    }
    root = Path(str(files("branchlake_dagster.cli") / "template"))
    project_paths = []
    for source in sorted(root.rglob(f"*{_SUFFIX}")):
        relative_path = str(source.relative_to(root)).removesuffix(_SUFFIX).replace(_NAME_PLACEHOLDER, name)
        path = target / relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = source.read_text()
        for placeholder, value in replacements.items():
            content = content.replace(placeholder, value)
        path.write_text(content)
        project_paths.append(path)
    home.mkdir(mode=0o700, parents=True)
    prepare_home(home)
    return project_paths


def format_own_requirement() -> str:
    """How a project depends on this very package, as it was installed."""
    package = distribution(DISTRIBUTION)
    return format_requirement(package.read_text("direct_url.json"), package.version)


def format_requirement(direct_url: str | None, version: str) -> str:
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
