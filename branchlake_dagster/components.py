"""The Dagster component that declares a lake in a `defs.yaml`.

`dg scaffold defs branchlake_dagster.components.BranchlakeComponent lake` creates such a file.
"""

from __future__ import annotations

from typing import Any

import dagster as dg

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import format_names

__all__ = ["BranchlakeComponent"]


class BranchlakeComponent(dg.Component, dg.Model, dg.Resolvable):
    """The IO manager, the Spark session, the publication sensor and the reaper of a lake.

    Assets of the project that name no other IO manager are stored in the lake. A run writes them on its own
    branch. The branch is checked and published to `main` in one step.

    Args:
        settings: Fields of `branchlake_dagster.Settings`. The environment (`BRANCHLAKE_…`) supplies the other
            fields. Take secrets from the environment: `nessie_token: "{{ env.NESSIE_TOKEN }}"`.
        name: The name of the lake if the project has several lakes. It is the prefix of the names of
            sensors, job, schedule and resource keys.
        lakehouse_key: The resource key of the lake. Default: `lakehouse`.
        spark_key: The resource key of the run's Spark session. Default: `spark`.
        io_manager_key: The resource key of the IO manager. Default: `io_manager`.

    Examples:
        .. code-block:: yaml

            type: branchlake_dagster.components.BranchlakeComponent

            attributes:
              settings:
                nessie_uri: https://nessie.example.org/api/v2
                nessie_token: "{{ env.NESSIE_TOKEN }}"
                warehouse: s3://lake/warehouse

    """

    settings: dict[str, Any] = {}  # noqa: RUF012 - a pydantic field, copied per instance
    name: str | None = None
    lakehouse_key: str | None = None
    spark_key: str | None = None
    io_manager_key: str | None = None

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:  # noqa: ARG002 - Dagster's signature
        """Return the lake's definitions. Raises ConfigurationError for a setting that does not exist."""
        unknown_settings = sorted(set(self.settings) - set(Settings.model_fields))
        if unknown_settings:
            raise ConfigurationError(
                f"The lake's defs.yaml has the {format_names('unknown setting', unknown_settings)}.",
                hint=f"The settings are {', '.join(sorted(Settings.model_fields))}.",
            )
        return branchlake_definitions(
            Settings(**self.settings),
            name=self.name,
            lakehouse_key=self.lakehouse_key,
            spark_key=self.spark_key,
            io_manager_key=self.io_manager_key,
        )
