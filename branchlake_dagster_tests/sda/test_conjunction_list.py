"""`branchlake sda conjunctions` and its sibling commands in a lake without tables."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from branchlake_dagster.cli.main import main
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.mark.parametrize(
    "options",
    [
        ("observations",),
        ("tracks",),
        ("alerts",),
        ("conjunctions",),
        ("conjunctions", "--csv"),
        ("conjunctions", "--changes-since", "main"),
        ("conjunctions", "--cdm", "messages", "--originator", "ABC"),
    ],
    ids=" ".join,
)
def test_a_list_without_a_table_is_empty(
    lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
    monkeypatch.setenv("BRANCHLAKE_NESSIE_URI", str(lakehouse.settings.nessie_uri))
    if "--changes-since" in options:
        options = (*options[:-1], lakehouse.nessie.reference("main").hash)
    result = CliRunner().invoke(main, ["sda", *options])
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert "Read at" in result.stderr
