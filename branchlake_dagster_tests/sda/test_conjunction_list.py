"""`branchlake sda conjunctions` and its sibling commands in a lake without tables."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import polars as pl
import pytest
from click.testing import CliRunner

from branchlake_dagster.cli.main import main
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.sda.commands.conjunction_list import listed_columns
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.mark.parametrize(
    "options",
    [
        ("observations",),
        ("tracks",),
        ("alerts",),
        ("conjunctions",),
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


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        (("conjunctions",), ("event_id", "tca", "sat1_name")),
        (("conjunctions", "--changes-since", "main"), ("change", "event_id", "was_tca", "sat1_name")),
        (("alerts",), ("alert_id", "tca", "acknowledged")),
        (("observations",), ("observation_id", "source_kind", "associated_sat_no")),
        (("tracks",), ("sat_no", "epoch", "n_radar", "position_sigma_km")),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_list_without_a_table_has_the_header_of_its_csv(
    lakehouse: Lakehouse,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    columns: tuple[str, ...],
) -> None:
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
    monkeypatch.setenv("BRANCHLAKE_NESSIE_URI", str(lakehouse.settings.nessie_uri))
    if "--changes-since" in options:
        options = (*options[:-1], lakehouse.nessie.reference("main").hash)
    result = CliRunner().invoke(main, ["sda", *options, "--csv"])
    assert result.exit_code == 0, result.output
    (header,) = result.stdout.splitlines()
    names = header.split(",")
    assert [name for name in names if name in columns] == list(columns)
    assert len(set(names)) == len(names)


def test_every_close_approach_is_new_since_a_state_before_the_first_list(
    lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
    monkeypatch.setenv("BRANCHLAKE_NESSIE_URI", str(lakehouse.settings.nessie_uri))
    before = lakehouse.nessie.reference("main").hash
    at = datetime(2026, 8, 11, 12, tzinfo=UTC)
    listed = pl.DataFrame(
        {
            "event_id": ["e1"],
            "kind": ["encounter"],
            "tca": [at],
            "miss_distance_km": [1.5],
            "sat1_object_designator": [1],
            "sat2_object_designator": [2],
            "screened_from": [at],
            "screened_until": [at],
            "threshold_km": [5.0],
        }
    ).to_arrow()
    names = pl.DataFrame({"sat_no": [1, 2], "object_name": ["A", "B"]}).to_arrow()
    catalog = lakehouse.catalog("main")
    catalog.create_namespace("sda")
    for table, rows in (("conjunctions", listed), ("catalogue", names)):
        catalog.create_table(("sda", table), rows.schema).append(rows)

    result = CliRunner().invoke(main, ["sda", "conjunctions", "--csv", "--changes-since", before])
    assert result.exit_code == 0, result.output
    changes = pl.read_csv(io.StringIO(result.stdout))
    assert changes["change"].to_list() == ["new"]
    assert changes.columns == list(listed_columns(changes=True))
