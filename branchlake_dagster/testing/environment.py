"""The environment of a test: settings that name a real lake do not reach it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import SecretStr

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.settings import Settings

_PREFIX = "BRANCHLAKE_"
_OF_THE_MACHINE = frozenset({"guard_nessie", "ivy_settings", "spark_driver_memory", "startup_timeout_s"})
"""What the environment says of these is about the machine and no lake, so a test takes it over."""
_FIXED = frozenset(
    {
        *("state_dir", "warehouse", "nessie_uri", "nessie_token", "nessie_verify_tls", "nessie_port"),
        *("s3_endpoint", "s3_region", "s3_access_key_id", "s3_secret_access_key"),
    }
)
"""A throw-away lake says these itself."""


@contextmanager
def settings_in_environment(state_dir: str, given: Mapping[str, Any]) -> Iterator[Settings]:
    """Let everything in this process that reads its settings from the environment find these ones.

    `given` are fields of `Settings`. Raises ConfigurationError for one that would name another lake.
    """
    if refused := sorted(_FIXED & given.keys()):
        raise ConfigurationError(
            f"A throw-away lake is a lake of its own, so it takes no {', '.join(refused)}.",
            hint="Give settings of behaviour only, such as require_checks or default_namespace.",
            reason="names_another_lake",
            subject=", ".join(refused),
        )
    ours = {f"{_PREFIX}{name}".upper(): name for name in Settings.model_fields}
    before = {name: os.environ[name] for name in os.environ if name.upper() in ours}
    for name in before:
        if ours[name.upper()] not in _OF_THE_MACHINE:
            del os.environ[name]
    try:
        settings = Settings(state_dir=state_dir, **given)
        os.environ.update(_as_environment(settings, {"state_dir", *given}))
        yield settings
    finally:
        for name in [name for name in os.environ if name.upper() in ours]:
            del os.environ[name]
        os.environ.update(before)


def _as_environment(settings: Settings, names: set[str]) -> dict[str, str]:
    found = {}
    for name in names:
        value = getattr(settings, name)
        if value is not None:
            text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
            found[f"{_PREFIX}{name}".upper()] = text
    return found
