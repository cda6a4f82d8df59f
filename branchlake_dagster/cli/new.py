"""The command `branchlake new`, which creates a Dagster project from the template in this package."""

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
"""The placeholder of the project's name in paths and files of the template."""
_REQUIREMENT_PLACEHOLDER = "BRANCHLAKE_REQUIREMENT"
_HOME_PLACEHOLDER = "PROJECT_DAGSTER_HOME"
_SUFFIX = ".template"
"""The suffix of the template's files, so that no tool treats them as modules of this package."""
_EXTRAS = "embedded,query,ui"


def create_project(target: Path, *, requirement: str | None = None) -> list[Path]:
    """Create a project in the folder `target` and return the paths of its files.

    Also creates Dagster's home, `.branchlake/dagster` in the project, with the `dagster.yaml` of
    `branchlake up`. So `dg dev` works without `branchlake up`.

    Args:
        target: A new or empty folder. Its name becomes the name of the project.
        requirement: The project's dependency on this package. If it is None, the installed package is used
            (see `format_requirement`).

    Raises:
        ConfigurationError: The folder is not empty, or its name is not a valid name of a Python package.
    """
    name = re.sub(r"[-. ]", "_", target.name)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigurationError(
            f"{target.name!r} cannot name a Python package.",
            hint="Use letters, digits and _, and start with a letter.",
            reason="package_name",
            subject=target.name,
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(
            f"{target} already exists and is not an empty folder.",
            hint="Name a new or an empty folder.",
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
    """Format a dependency on this package as it is installed here."""
    package = distribution(DISTRIBUTION)
    return format_requirement(package.read_text("direct_url.json"), package.version)


def format_requirement(direct_url: str | None, version: str) -> str:
    """Format a dependency on this package for `pyproject.toml`, which pip can resolve on this machine.

    `direct_url` is the content of pip's `direct_url.json` (PEP 610) if the package was installed from a
    clone or a wheel. It is None if the package came from an index, so that its version is enough.
    """
    if direct_url is None:
        return f"{DISTRIBUTION}[{_EXTRAS}]>={version}"
    origin = json.loads(direct_url)
    vcs = origin.get("vcs_info")
    url = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else origin["url"]
    return f"{DISTRIBUTION}[{_EXTRAS}] @ {url}"
