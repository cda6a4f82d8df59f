"""The shared lake behind a guard, opened as an operator would: by environment variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse

from .guard import Guard, guarding

Bearer = Callable[[str | None], Lakehouse]


@pytest.fixture
def guard(nessie_uri: str) -> Iterator[Guard]:
    """A guard before the shared Nessie."""
    with guarding(nessie_uri) as found:
        yield found


@pytest.fixture
def bearer(guard: Guard, lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bearer:
    """Open the shared lake through the guard with a token, from now on by everybody in this process."""

    def open_with(token: str | None) -> Lakehouse:
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
        monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
        monkeypatch.setenv("BRANCHLAKE_NESSIE_URI", guard.uri)
        if token is None:
            monkeypatch.delenv("BRANCHLAKE_NESSIE_TOKEN", raising=False)
        else:
            monkeypatch.setenv("BRANCHLAKE_NESSIE_TOKEN", token)
        return Lakehouse()

    return open_with
