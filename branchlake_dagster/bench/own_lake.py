"""The temporary lake of a benchmark."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.settings import Settings


@contextmanager
def own_lake(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with a temporary state folder, landing folder, broker and Dagster home.

    Raises ConfigurationError if they name other servers: benchmarks write tables to `main`, some of them with
    the names that the pipeline's have.
    """
    remote_by_variable = {
        "BRANCHLAKE_NESSIE_URI": not settings.embedded_nessie,
        "BRANCHLAKE_SPARK_REMOTE": settings.spark_remote is not None,
        "BRANCHLAKE_WAREHOUSE": not settings.embedded_warehouse,
        "BRANCHLAKE_KAFKA_SECURITY": settings.kafka_security != "PLAINTEXT",
    }
    if remote_variables := [name for name, is_remote in remote_by_variable.items() if is_remote]:
        raise ConfigurationError(
            f"A benchmark needs its own servers, but {', '.join(remote_variables)} names other servers.",
            hint="Run the benchmark without these variables:"
            f" env {' '.join(f'-u {name}' for name in remote_variables)} branchlake bench …",
            reason="servers_of_others",
            subject=", ".join(remote_variables),
        )
    old_home = os.environ.get("DAGSTER_HOME")
    with tempfile.TemporaryDirectory(prefix="branchlake-bench-") as folder:
        os.environ["DAGSTER_HOME"] = str(Path(folder, "dagster"))
        try:
            yield settings.model_copy(
                update={"state_dir": Path(folder, "state"), "kafka_bootstrap": None, "landing": None}
            )
        finally:
            if old_home is None:
                del os.environ["DAGSTER_HOME"]
            else:
                os.environ["DAGSTER_HOME"] = old_home
