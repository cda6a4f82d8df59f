"""The code location that a command is about, and the settings of its lake."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from dagster import RepositoryDefinition, build_resources

from branchlake_dagster.cli.command_settings import ENVIRONMENT, CommandSettings, command_settings
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import (
    NamedLocation,
    env_file_variables,
    module_location,
    named_locations,
    repository_of,
)
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings

_LONGEST_ERROR = 200
"""Characters of an error that a line about a code location shows."""


@dataclass(frozen=True)
class LoadedLocation:
    """A code location in this process. `origin` is `-m`, or the file that names it."""

    name: str
    origin: str
    repository: RepositoryDefinition

    @property
    def text(self) -> str:
        """The code location and who named it."""
        return f"{self.name} ({self.origin if self.origin == '-m' else f'found in {self.origin}'})"


@dataclass(frozen=True)
class Lake:
    """A lake of a code location: the key of its resource, and its settings."""

    key: str
    settings: Settings
    location: LoadedLocation


def module_settings(module: str) -> CommandSettings:
    """The settings of the code location in a module. Raises ConfigurationError."""
    _read_env_file()
    try:
        with _quietly():
            repository = repository_of(module_location(module))
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"{module} cannot be loaded as a code location: {error}",
            hint="Name the module with your Definitions: -m my_project.definitions.",
        ) from error
    location = LoadedLocation(module, "-m", repository)
    return _settings_of(lakes_of(location), [location], [])


def project_settings(files: Sequence[Path]) -> CommandSettings:
    """The settings of the only lake of a project; the environment's if it has none or cannot be loaded.

    Of the files that name code locations the first one counts, as for Dagster. Every code location that it
    names is imported.

    Args:
        files: `dg.toml`, `pyproject.toml`, `workspace.yaml` of the working folder, in this order.

    Raises:
        ConfigurationError: The code locations have several lakes, and the environment names none of them.
    """
    _read_env_file()
    locations: list[LoadedLocation] = []
    lakes: list[Lake] = []
    troubles: list[str] = []
    for file, named in _first_named(files, troubles):
        # A project that is only found must not stop a command that the environment alone can serve.
        try:
            with _quietly():
                location = LoadedLocation(named.name, file.name, repository_of(named))
                lakes += lakes_of(location)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            troubles.append(_cannot_be_loaded(f"{named.name} (found in {file.name})", error))
        else:
            locations.append(location)
    return _settings_of(lakes, locations, troubles)


def _first_named(files: Sequence[Path], troubles: list[str]) -> list[tuple[Path, NamedLocation]]:
    for file in files:
        try:
            named = named_locations(file)
        except Exception as error:  # noqa: BLE001 - Dagster's readers have no error of their own
            troubles.append(_cannot_be_loaded(file.name, error))
            return []
        if named:
            return [(file, one) for one in named]
    return []


def _cannot_be_loaded(name: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".") if lines else ""
    if not isinstance(error, ImportError) or not text:  # Dagster's text names an ImportError already
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    short = text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]} …"
    return f"{name} cannot be loaded: {short}"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep what a code location prints out of the command's output, which may be JSON, and its warnings too.

    Dagster's own commands show the warnings whenever they load the code location.
    """
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _read_env_file() -> None:
    for name, value in env_file_variables(str(Path.cwd())).items():
        os.environ.setdefault(name, value)


def lakes_of(location: LoadedLocation) -> list[Lake]:
    """The lakes among the resources of a code location, by key."""
    resources = {
        key: definition
        for key, definition in sorted(location.repository.get_top_level_resources().items())
        if issubclass(getattr(definition, "configurable_resource_cls", object), LakehouseResource)
    }
    if not resources:
        return []
    with build_resources(resources) as built:
        return [Lake(key, getattr(built, key).effective(), location) for key in resources]


def _settings_of(
    lakes: Sequence[Lake], locations: Sequence[LoadedLocation], troubles: Sequence[str]
) -> CommandSettings:
    trouble = "; ".join(troubles) or None
    if not lakes:
        return CommandSettings(Settings(), ENVIRONMENT, tuple(locations), trouble)
    chosen = _one_lake(lakes)
    source = " and ".join(f"{one.key} of {one.location.text}" for one in chosen)
    return CommandSettings(chosen[0].settings, source, tuple(one.location for one in chosen), trouble)


def _one_lake(lakes: Sequence[Lake]) -> list[Lake]:
    """One lake, or the same lake of several code locations.

    Of several lakes the one that the environment names.

    Raises ConfigurationError if the environment names none of them.
    """
    chosen = list(lakes)
    if not _same_settings(chosen):
        wanted = Settings().lake_id
        chosen = [one for one in lakes if one.settings.lake_id == wanted]
    if chosen and (_same_settings(chosen) or len(_places(chosen)) == 1):
        return list({one.location.name: one for one in reversed(chosen)}.values())[::-1]
    places = _places(lakes)
    listed = ", ".join(f"{one.key} of {one.location.name}" for one in lakes)
    name_one = f"{_name_a_module(places)}, or set" if len(places) > 1 else "Set"
    raise ConfigurationError(
        f"There are several lakes ({listed}), and the environment does not name one of them.",
        hint=f"{name_one} BRANCHLAKE_NESSIE_URI and BRANCHLAKE_WAREHOUSE to those of the lake that you mean.",
    )


def _same_settings(lakes: Sequence[Lake]) -> bool:
    return all(one.settings.model_dump() == lakes[0].settings.model_dump() for one in lakes)


def _places(lakes: Sequence[Lake]) -> list[str]:
    return sorted({one.location.name for one in lakes})


def _name_a_module(names: Sequence[str]) -> str:
    return f"Name the module of one: {' or '.join(f'-m {name}' for name in names)}"


def required_location(module: str | None) -> tuple[LoadedLocation, CommandSettings]:
    """The code location of a command that cannot do without one, with its settings. Prints their source.

    Raises click.UsageError if `module` is None and the working folder names no code location or several, and
    ConfigurationError if one cannot be loaded.
    """
    found = command_settings(module)
    if len(found.locations) == 1:
        return found.locations[0], found
    if found.locations:
        raise click.UsageError(
            "This command needs your Definitions, and the project has several code locations."
            f" {_name_a_module([one.name for one in found.locations])}."
        )
    if found.trouble is not None:
        raise ConfigurationError(
            f"This command needs your Definitions. {found.trouble}.",
            hint="Correct the error, or name another module: -m my_project.definitions.",
        )
    raise click.UsageError(
        "This command needs your Definitions, and no file of the working folder names a code location."
        " Name the module, -m my_project.definitions, or run the command in the folder of the project."
    )


def format_settings(settings: Settings, names: Sequence[str], source: str) -> str:
    """The values of these settings, each with its source."""
    return ", ".join(
        f"{name}={getattr(settings, name):g} ({source if name in settings.model_fields_set else 'default'})"
        for name in names
    )
