"""The contracts name every column of the tables, with the types that are stored, and say what it means."""

import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster import column_metadata
from branchlake_dagster.sda import contracts
from branchlake_dagster.sda.assets.alerts import ALERT_COLUMNS, CONJUNCTION_ALERTS
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.catalogue import (
    CATALOGUE,
    ELEMENT_SETS,
    REJECTED_RECORDS,
    SATELLITE_ENTRIES,
)
from branchlake_dagster.sda.assets.conjunctions import CONJUNCTIONS
from branchlake_dagster.sda.assets.ephemerides import EPHEMERIS_CONJUNCTIONS
from branchlake_dagster.sda.assets.hour_reports import HOUR_REPORTS, REPORT_SCHEMA
from branchlake_dagster.sda.assets.observations import OBSERVATIONS, REJECTED_OBSERVATIONS
from branchlake_dagster.sda.assets.quarantine import QUARANTINED_OBJECTS
from branchlake_dagster.sda.assets.registry import (
    ELEMENT_HISTORY,
    MERGE_AUDIT,
    OBJECTS,
    SATELLITES,
)
from branchlake_dagster.sda.assets.risks import CONJUNCTION_RISKS
from branchlake_dagster.sda.assets.tracks import FUSED_TRACKS
from branchlake_dagster.sda.assets.trust import ELEMENT_ERRORS, ELEMENT_JUMPS, OBJECT_ERRORS
from branchlake_dagster.sda.association.arrow import ASSOCIATION_SCHEMA
from branchlake_dagster.sda.conjunctions.arrow import ENCOUNTER_SCHEMA
from branchlake_dagster.sda.conjunctions.listing import CONJUNCTION_SCHEMA, build_rows
from branchlake_dagster.sda.conjunctions.risks import RISK_SCHEMA
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Span
from branchlake_dagster.sda.contracts.by_kind import (
    association_contract,
    fused_track_contract,
    observation_contract,
    rejected_observation_contract,
)
from branchlake_dagster.sda.ephemerides.distributed import EPHEMERIS_CONJUNCTION_SCHEMA
from branchlake_dagster.sda.estimation.arrow import track_schema
from branchlake_dagster.sda.gp.rules import REJECTED_COLUMNS
from branchlake_dagster.sda.graph.definitions import fusion_assets
from branchlake_dagster.sda.graph.sensor_graph import sensor_assets
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.registry.life_cycle import OBJECT_COLUMNS
from branchlake_dagster.sda.registry.merge import AUDIT_COLUMNS, CATALOGUE_COLUMNS, PULLED_COLUMNS
from branchlake_dagster.sda.registry.satcat import ENTRY_COLUMNS
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS
from branchlake_dagster.sda.trust.assessment import assess_approaches
from branchlake_dagster.sda.trust.radii import ObjectRadii
from branchlake_dagster.tables.schemas import format_type, stored_type

SOURCE_KINDS = [kind.source_kind for kind in DEFAULT_SENSOR_KINDS]
CONTRACTS = {
    ELEMENT_SETS: contracts.ElementSet,
    REJECTED_RECORDS: contracts.RejectedRecord,
    SATELLITE_ENTRIES: contracts.SatelliteEntry,
    CATALOGUE: contracts.CatalogueEntry,
    OBJECTS: contracts.RegisteredObject,
    ELEMENT_HISTORY: contracts.ElementSet,
    MERGE_AUDIT: contracts.MergeOutcome,
    SATELLITES: contracts.Satellite,
    OBSERVATIONS: observation_contract(SOURCE_KINDS),
    ASSOCIATIONS: association_contract(SOURCE_KINDS),
    REJECTED_OBSERVATIONS: rejected_observation_contract(SOURCE_KINDS),
    QUARANTINED_OBJECTS: contracts.QuarantinedObject,
    FUSED_TRACKS: fused_track_contract(SOURCE_KINDS),
    CONJUNCTION_RISKS: contracts.ConjunctionRisk,
    CONJUNCTION_ALERTS: contracts.ConjunctionAlert,
    HOUR_REPORTS: contracts.HourReport,
    CONJUNCTIONS: contracts.Conjunction,
    EPHEMERIS_CONJUNCTIONS: contracts.EphemerisConjunction,
    ELEMENT_ERRORS: contracts.ElementError,
    OBJECT_ERRORS: contracts.ObjectError,
    ELEMENT_JUMPS: contracts.ElementJump,
}
UNIT_OF_ENDING = {
    "_km_s": "km/s",
    "_m_s": "m/s",
    "_km": "km",
    "_m": "m",
    "_deg": "deg",
    "_rad": "rad",
    "_arcsec": "arcsec",
    "_ns": "ns",
    "_s": "s",
    "_days": "d",
    "_min": "min",
}


def stored(schema: pa.Schema) -> dict[str, str]:
    return {one.name: format_type(stored_type(one.type, one.name, ""), table_name="") for one in schema}


def of_polars(columns: dict[str, pl.DataType]) -> dict[str, str]:
    return stored(pl.DataFrame(schema=columns).to_arrow().schema)


def described(model: type) -> list[dg.TableColumn]:
    return column_metadata(model)["dagster/column_schema"].columns


def types(model: type) -> dict[str, str]:
    return {one.name: one.type for one in described(model)}


def in_order(columns: dict[str, str]) -> list[tuple[str, str]]:
    return list(columns.items())


def test_the_contracts_are_the_tables_column_by_column():
    text = {"snapshot_id": "string"}
    assert in_order(types(contracts.ElementSet)) == in_order(of_polars(PULLED_COLUMNS))
    assert in_order(types(contracts.CatalogueEntry)) == in_order(of_polars(CATALOGUE_COLUMNS))
    assert in_order(types(contracts.MergeOutcome)) == in_order(of_polars(AUDIT_COLUMNS))
    assert in_order(types(contracts.RegisteredObject)) == in_order(of_polars(OBJECT_COLUMNS))
    entries = {**text, **of_polars(ENTRY_COLUMNS), "collected_at": "timestamptz"}
    assert in_order(types(contracts.SatelliteEntry)) == in_order(entries)
    assert in_order(types(contracts.RejectedRecord)) == in_order({**text, **of_polars(REJECTED_COLUMNS)})
    assert in_order(types(CONTRACTS[ASSOCIATIONS])) == in_order(stored(ASSOCIATION_SCHEMA))
    assert in_order(types(CONTRACTS[FUSED_TRACKS])) == in_order(stored(track_schema(SOURCE_KINDS)))
    assert in_order(types(contracts.ConjunctionRisk)) == in_order(stored(RISK_SCHEMA))
    assert in_order(types(contracts.HourReport)) == in_order(stored(REPORT_SCHEMA))
    assert tuple(contracts.ConjunctionAlert.to_schema().columns) == ALERT_COLUMNS
    nothing = build_rows(pl.DataFrame(ENCOUNTER_SCHEMA.empty_table()), None, Span.whole(0, MINUTE), 5.0, 14.0)
    no_elements = Elements(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, len(ELEMENT_FIELDS))))
    rows = assess_approaches(nothing, no_elements, None, ObjectRadii(5.0))
    assert types(contracts.Conjunction) == stored(CONJUNCTION_SCHEMA)
    assert types(contracts.EphemerisConjunction) == stored(EPHEMERIS_CONJUNCTION_SCHEMA)
    assert rows.columns == CONJUNCTION_SCHEMA.names


@pytest.mark.parametrize("model", dict.fromkeys(CONTRACTS.values()), ids=lambda one: one.__name__)
def test_every_column_has_its_meaning_and_the_unit_of_its_name(model):
    for column in described(model):
        assert (column.description or "").endswith("."), column.name
        ending = next((one for one in UNIT_OF_ENDING if column.name.endswith(one)), None)
        if ending:
            assert column.tags == {"unit": UNIT_OF_ENDING[ending]}, column.name


def test_elements_and_covariance_have_the_units_of_the_orbit_messages():
    units = {one.name: one.tags.get("unit") for one in described(contracts.ElementSet)}
    assert units["mean_motion"] == "rev/day"
    assert {units[name] for name in ("inclination", "ra_of_asc_node", "mean_anomaly")} == {"deg"}
    assert units["eccentricity"] is None
    for column in described(CONTRACTS[FUSED_TRACKS]):
        if column.name.startswith("c") and column.name[1:2] in "xyz":
            per_second = column.name.count("dot")
            assert column.tags["unit"] == ("km²", "km²/s", "km²/s²")[per_second], column.name


def test_every_asset_shows_the_columns_of_its_own_contract():
    specs = {
        spec.key: spec
        for asset in [*fusion_assets, *sensor_assets(DEFAULT_SENSOR_KINDS)]
        for spec in asset.specs
    }
    assert specs.keys() == CONTRACTS.keys()
    for key, model in CONTRACTS.items():
        assert specs[key].metadata["dagster/column_schema"] == column_metadata(model)["dagster/column_schema"]
