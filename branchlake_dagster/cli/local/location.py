"""The code location that a command is about, and the settings of its lake."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dagster import RepositoryDefinition, build_resources

from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.library_internals.dagster import repository_in
from branchlake_dagster.settings import Settings


def code_location(module: str) -> RepositoryDefinition:
    """Load the code location in a module, from the working folder. Raises ConfigurationError."""
    try:
        return repository_in(module, str(Path.cwd()))
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"{module} cannot be loaded as a code location: {error}",
            hint="Name the module with your Definitions: -m my_project.definitions.",
        ) from error


def location_settings(repository: RepositoryDefinition) -> Settings:
    """The settings of the lake of a code location; the environment's if it has no lake.

    Of several lakes, that which the environment names. Raises ConfigurationError if it names none of them.
    """
    lakes = {
        key: definition
        for key, definition in repository.get_top_level_resources().items()
        if issubclass(getattr(definition, "configurable_resource_cls", object), LakehouseResource)
    }
    if not lakes:
        return Settings()
    with build_resources(lakes) as resources:
        found: list[Settings] = [getattr(resources, key).effective() for key in lakes]
    if len(found) > 1:
        wanted = Settings().lake_id
        found = [one for one in found if one.lake_id == wanted]
    if not found:
        raise ConfigurationError(
            f"The code location has {len(lakes)} lakes ({', '.join(sorted(lakes))}), and the environment"
            " names none of them.",
            hint="Set BRANCHLAKE_NESSIE_URI and BRANCHLAKE_WAREHOUSE to those of the lake that you mean.",
        )
    return found[0]


def settings_of(module: str | None) -> Settings:
    """The settings of the code location in `module`, or the environment's if it is None."""
    return Settings() if module is None else location_settings(code_location(module))


def format_settings(settings: Settings, names: Sequence[str], module: str | None) -> str:
    """The values of these settings, each with its source."""
    source = "the environment" if module is None else module
    return ", ".join(
        f"{name}={getattr(settings, name):g} ({source if name in settings.model_fields_set else 'default'})"
        for name in names
    )
