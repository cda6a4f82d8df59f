"""Loading of the code location that a command works with, and of the settings of its lake."""

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

from branchlake_dagster.cli.command_settings import ENVIRONMENT, CommandSettings, load_command_settings
from branchlake_dagster.errors import BranchlakeError, ConfigurationError, format_first_line
from branchlake_dagster.internals.dagster import (
    NamedLocation,
    import_repository,
    module_location,
    read_env_variables,
    read_named_locations,
)
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings


@dataclass(frozen=True)
class LoadedLocation:
    """A code location that this process has imported.

    `origin` is `-m`, or the file that names the location.
    """

    name: str
    origin: str
    repository: RepositoryDefinition

    @property
    def description(self) -> str:
        """The name of the code location, with its origin."""
        return f"{self.name} ({self.origin if self.origin == '-m' else f'found in {self.origin}'})"


@dataclass(frozen=True)
class LocationLake:
    """A lake of a code location, with the key of its resource and its settings."""

    key: str
    settings: Settings
    location: LoadedLocation


def load_module_settings(module: str) -> CommandSettings:
    """Load the settings of the lake in a module's code location.

    Raises ConfigurationError if the module cannot be loaded, or if it has several lakes and the environment
    names none of them.
    """
    _read_env_file()
    try:
        with _silence_output():
            repository = import_repository(module_location(module))
    except BranchlakeError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{_format_load_error(module, error)}.",
            hint="Correct it, or name the module with your Definitions: -m my_project.definitions.",
        ) from error
    location = LoadedLocation(module, "-m", repository)
    return _select_settings(find_lakes(location), [location], [])


def load_project_settings(files: Sequence[Path]) -> CommandSettings:
    """Load the settings of the only lake of a project.

    Like Dagster, uses the first file that names code locations, and imports all of them. The settings come
    from the environment if the project has no lake or cannot be loaded.

    Args:
        files: `dg.toml`, `pyproject.toml` and `workspace.yaml` of the working folder, in this order.

    Raises:
        ConfigurationError: The code locations have several lakes, and the environment names none of them.
    """
    _read_env_file()
    locations: list[LoadedLocation] = []
    lakes: list[LocationLake] = []
    load_errors: list[str] = []
    for file, named_location in _first_named_locations(files, load_errors):
        # The user did not name this project, so an error in it must not stop the command.
        try:
            with _silence_output():
                location = LoadedLocation(named_location.name, file.name, import_repository(named_location))
                lakes += find_lakes(location)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            load_errors.append(_format_load_error(f"{named_location.name} (found in {file.name})", error))
        else:
            locations.append(location)
    return _select_settings(lakes, locations, load_errors)


def _first_named_locations(files: Sequence[Path], load_errors: list[str]) -> list[tuple[Path, NamedLocation]]:
    for file in files:
        try:
            locations = read_named_locations(file)
        except Exception as error:  # noqa: BLE001 - Dagster's readers have no error class
            load_errors.append(_format_load_error(file.name, error))
            return []
        if locations:
            return [(file, location) for location in locations]
    return []


def _format_load_error(name: str, error: Exception) -> str:
    # Dagster's ImportError already names the class of the error that the module raised.
    return (
        f"{name} cannot be loaded: {format_first_line(error, names_class=not isinstance(error, ImportError))}"
    )


@contextlib.contextmanager
def _silence_output() -> Iterator[None]:
    """Redirect the output of a code location to standard error, and suppress its warnings.

    The output of the command may be JSON. Dagster's own commands show the warnings.
    """
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _read_env_file() -> None:
    """Set the variables of the working folder's `.env` that are not set already.

    Raises ConfigurationError if the file cannot be read, or has what no variable can hold.
    """
    path = Path.cwd() / ".env"
    try:
        for name, value in read_env_variables(str(path.parent)).items():
            os.environ.setdefault(name, value)
    except (OSError, ValueError) as error:  # also for bytes that are not UTF-8, and for null characters
        raise ConfigurationError(
            f"{path} cannot be loaded: {format_first_line(error)}.",
            hint="Save it as UTF-8 with a line NAME=value for each variable, and make it readable.",
            reason="env_file",
            subject=str(path),
        ) from error


def find_lakes(location: LoadedLocation) -> list[LocationLake]:
    """Return the lakes among the resources of a code location, sorted by resource key."""
    resources = {
        key: definition
        for key, definition in sorted(location.repository.get_top_level_resources().items())
        if issubclass(getattr(definition, "configurable_resource_cls", object), LakehouseResource)
    }
    if not resources:
        return []
    with build_resources(resources) as instances:
        return [LocationLake(key, getattr(instances, key).effective(), location) for key in resources]


def _select_settings(
    lakes: Sequence[LocationLake], locations: Sequence[LoadedLocation], load_errors: Sequence[str]
) -> CommandSettings:
    trouble = "; ".join(load_errors) or None
    if not lakes:
        return CommandSettings(Settings(), ENVIRONMENT, tuple(locations), trouble)
    selected_lakes = _select_lake(lakes)
    source = " and ".join(f"{lake.key} of {lake.location.description}" for lake in selected_lakes)
    return CommandSettings(
        selected_lakes[0].settings, source, tuple(lake.location for lake in selected_lakes), trouble
    )


def _select_lake(lakes: Sequence[LocationLake]) -> list[LocationLake]:
    """Select the lake of a command: the only lake, or the lake that the environment names.

    The result has one element for each code location with this lake. Raises ConfigurationError if there are
    several lakes and the environment names none of them.
    """
    selected_lakes = list(lakes)
    if not _have_same_settings(selected_lakes):
        lake_id = Settings().lake_id
        selected_lakes = [lake for lake in lakes if lake.settings.lake_id == lake_id]
    if selected_lakes and (
        _have_same_settings(selected_lakes) or len(_list_location_names(selected_lakes)) == 1
    ):
        return list({lake.location.name: lake for lake in reversed(selected_lakes)}.values())[::-1]
    location_names = _list_location_names(lakes)
    lake_names = ", ".join(f"{lake.key} of {lake.location.name}" for lake in lakes)
    module_advice = f"{_format_module_choice(location_names)}, or set" if len(location_names) > 1 else "Set"
    raise ConfigurationError(
        f"The code locations have several lakes ({lake_names}), and the environment names none of them.",
        hint=f"{module_advice} BRANCHLAKE_NESSIE_URI and BRANCHLAKE_WAREHOUSE to the addresses of one lake.",
    )


def _have_same_settings(lakes: Sequence[LocationLake]) -> bool:
    return all(lake.settings.model_dump() == lakes[0].settings.model_dump() for lake in lakes)


def _list_location_names(lakes: Sequence[LocationLake]) -> list[str]:
    return sorted({lake.location.name for lake in lakes})


def _format_module_choice(names: Sequence[str]) -> str:
    return f"Name one module: {' or '.join(f'-m {name}' for name in names)}"


def require_location(module: str | None) -> tuple[LoadedLocation, CommandSettings]:
    """Return the only code location of a command, and its settings. Prints the source of the settings.

    Raises:
        click.UsageError: `module` is None, and the working folder names no code location or several.
        ConfigurationError: A code location cannot be loaded.
    """
    loaded_settings = load_command_settings(module)
    if len(loaded_settings.locations) == 1:
        return loaded_settings.locations[0], loaded_settings
    if loaded_settings.locations:
        raise click.UsageError(
            "This command needs one code location, but the project has several."
            f" {_format_module_choice([location.name for location in loaded_settings.locations])}."
        )
    if loaded_settings.trouble is not None:
        raise ConfigurationError(
            f"This command needs a code location. {loaded_settings.trouble}.",
            hint="Correct the error, or name another module: -m my_project.definitions.",
        )
    raise click.UsageError(
        "This command needs a code location, but no file in the working folder names one."
        " Name the module (-m my_project.definitions), or run the command in the folder of the project."
    )


def format_settings(settings: Settings, names: Sequence[str], source: str) -> str:
    """Format settings as `name=value (source)`, separated by commas. The values must be numbers.

    `names` are the names of the settings' fields. The source is `default` for fields that were not set, and
    `source` for all others.
    """
    return ", ".join(
        f"{name}={getattr(settings, name):g} ({source if name in settings.model_fields_set else 'default'})"
        for name in names
    )
