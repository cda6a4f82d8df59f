"""Bytes that a wrong decoder has read are decoded again, and everything that follows from them is corrected.

`BRANCHLAKE_TEST_SHUFFLE_SEED` is the seed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from pyspark import cloudpickle

from branchlake_dagster.cli.main import main
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.receivers.records import Record
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.observations import OBSERVATIONS, REJECTED_OBSERVATIONS
from branchlake_dagster.sda.commands.alert_reader import AlertReader
from branchlake_dagster.sda.sensor_kinds.declaration import DecodeBytes, SensorKind
from branchlake_dagster.sda.sensor_kinds.radar import RADAR
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS
from branchlake_dagster.sda.wire.columns import join_binary
from branchlake_dagster.sda.wire.radar import RADAR as FRAME
from branchlake_dagster.sda.wire.radar import decode_radar
from branchlake_dagster_tests.dagster_internals import COMPUTE_LOGS
from branchlake_dagster_tests.sda.consuming_runs import ConsumingRuns
from branchlake_dagster_tests.sda.shuffled_bytes import (
    DEAD_LETTERS,
    GP_FOLDER,
    KEPT_RECORDS,
    RAW_TABLES,
    Pipeline,
    SimulatedBytes,
    Tables,
    crossing_objects,
    settle,
    simulate_bytes,
)
from branchlake_dagster_tests.sda.test_registry_lake import empty_lake

# Spark's workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

__all__ = ["empty_lake"]

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3_600)]

START = datetime(2026, 8, 8, 3, tzinfo=UTC)
SEED = int(os.environ.get("BRANCHLAKE_TEST_SHUFFLE_SEED", "0"))
HOURS, PAIRS = 3, 40
_expected = Tables()
LOCATION = "branchlake_dagster_tests.sda.reprocessing_location"
GPS_AHEAD_OF_UTC_NS = 18_000_000_000
COMPUTED = ("observations", "rejected_observations", "associations", "tracks", "risks", "net_alerts")


def decode_wrongly(values: pa.Array | pa.ChunkedArray) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Decode radar frames with four errors.

    The radars with even numbers have a range that is 900 m too long. Radar 3 has GPS time instead of UTC, so
    its measurements seem to be from after their receipt. Frames with an azimuth above 350 degrees become dead
    letters. Frames with an impossible range rate become rows without a rate.
    """
    values = pa.concat_arrays(values.chunks) if isinstance(values, pa.ChunkedArray) else values
    values = values.cast(pa.binary())
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
    whole = np.flatnonzero(lengths == FRAME.itemsize)
    frames = np.frombuffer(b"".join(values.take(pa.array(whole)).to_pylist()), FRAME).copy()
    frames["range_m"] += np.where(frames["array_id"] % 2 == 0, 900.0, 0.0)
    frames["timestamp_ns"] += np.where(frames["array_id"] == 3, np.uint64(GPS_AHEAD_OF_UTC_NS), np.uint64(0))
    with np.errstate(invalid="ignore"):
        frames["range_rate_m_s"][np.abs(frames["range_rate_m_s"]) > 25_000] = 0.0
        frames["azimuth_rad"][frames["azimuth_rad"] > np.radians(350)] = 7.0
    order = np.arange(len(values))
    order[whole] = len(values) + np.arange(len(whole))
    return decode_radar(pa.concat_arrays([values, join_binary(frames)]).take(pa.array(order)))


def refuse(values: pa.Array | pa.ChunkedArray) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Decode no radar frame: each becomes a dead letter."""
    rows, reasons = decode_radar(values)
    return rows, pa.array(["not supported yet"] * len(reasons))


def kinds_with(decode: DecodeBytes) -> list[SensorKind]:
    return [replace(kind, decode=decode) if kind is RADAR else kind for kind in DEFAULT_SENSOR_KINDS]


@dataclass
class Chain:
    """The pipeline, its bytes, and the tables that the right decoder gives from the start."""

    pipeline: Pipeline
    simulated: SimulatedBytes
    expected: Tables
    instance: dg.DagsterInstance
    is_short: bool = False
    """Whether only radars are ingested, and the sensors of tracks and alerts launch nothing."""
    begins: list[datetime] = field(default_factory=list)
    """When each part of the records was received."""

    def advance(
        self, records: Sequence[tuple[str, Record]], *, follow: bool = True, **options: Any
    ) -> list[tuple[str, str | None]]:
        """Receive records, ingest them and, unless told otherwise, let the sensors launch what follows."""
        # Times of receipt are selected by whole seconds.
        time.sleep(1.1)
        self.begins.append(datetime.now(UTC))
        self.pipeline.land(records)
        with self.pipeline.project(self.instance, keep_value=True, **options) as p:
            if self.is_short:
                settle(p, RADAR.raw_table, DEAD_LETTERS[0], KEPT_RECORDS[0])
            else:
                self.pipeline.ingest(p, *KEPT_RECORDS)
        return self.follow() if follow else []

    def reprocess(self, *arguments: str) -> RunState:
        """Run `branchlake reprocess radar`. Return what became of its run."""
        with self.pipeline.project(self.instance, keep_value=True) as p:
            result = CliRunner().invoke(main, ["reprocess", "radar", "-m", LOCATION, *arguments])
            assert result.exit_code == 0, (result.output, result.exception)
            (run,) = self.instance.get_runs(limit=1)
            return p.settle(run.run_id).state

    def reprocess_from_raw(self, since: datetime, until: datetime) -> RunState:
        """Run `branchlake reprocess radar --from-raw`. Return what became of its run."""
        form = "%Y-%m-%dT%H:%M:%S"
        return self.reprocess("--from-raw", "--since", f"{since:{form}}", "--until", f"{until:{form}}")

    def follow(self) -> list[tuple[str, str | None]]:
        """Let the sensors launch what follows, and return the runs."""
        with self.pipeline.project(self.instance, keep_value=True) as p:
            return ConsumingRuns(p, up_to_associations=self.is_short).follow()

    def raw_rows(self) -> dict[str, pl.DataFrame]:
        """The rows of the raw tables, by name."""
        frames = {key.path[-1]: self.pipeline.rows(key) for key in RAW_TABLES}
        return {name: frame.sort("topic_partition", "topic_offset") for name, frame in frames.items()}


@pytest.fixture
def chain(empty_lake: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chain]:
    with chain_of(empty_lake, tmp_path, monkeypatch, hours=HOURS, pairs=PAIRS) as made:
        if not _expected.frames:  # the same for all tests of this module
            tables = made.pipeline.compute(made.simulated, None, 1)
            raw = {key.path[-1]: made.pipeline.rows(key) for key in RAW_TABLES}
            _expected.frames |= tables.frames | {
                name: frame.sort("topic_offset") for name, frame in raw.items()
            }
            assert _expected.frames["net_alerts"].height
            made.pipeline.remove_measurements()
        made.expected.frames |= _expected.frames
        yield made


@pytest.fixture
def short_chain(empty_lake: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chain]:
    """A small one, which ends at the associations. Nothing is expected of it."""
    with chain_of(empty_lake, tmp_path, monkeypatch, hours=1, pairs=8) as made:
        made.is_short = True
        yield made


@contextmanager
def chain_of(
    empty_lake: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, hours: int, pairs: int
) -> Iterator[Chain]:
    print(f"seed {SEED}")  # noqa: T201 - a failure is repeated by it
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\n{COMPUTE_LOGS}\n")
    pipeline = Pipeline(empty_lake, tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(empty_lake.settings.state_dir))
    monkeypatch.setenv("BRANCHLAKE_LANDING", str(pipeline.landing))
    monkeypatch.setenv(GP_FOLDER, str(pipeline.gp))
    monkeypatch.delitem(sys.modules, LOCATION, raising=False)
    elements = crossing_objects(START, pairs=pairs, seed=SEED)
    rates = {"radar": 0.5, "optical": 0.1, "isl": 0.1}
    simulated = simulate_bytes(elements, START, hours=hours, per_s=rates, seed=SEED)
    pipeline.publish_catalog(elements, START)
    with dg.DagsterInstance.get() as instance:
        yield Chain(pipeline, simulated, Tables(), instance)


def tables_of(chain: Chain) -> Tables:
    tables = chain.pipeline.read()
    return Tables({**tables.frames, **chain.raw_rows()})


def is_consistent(log: pl.DataFrame, lake: Lakehouse) -> None:
    """A subscriber gets each alert's entries as insert 0, retract 0, insert 1, and so on, each once."""
    delivered = [entry for delivery in AlertReader(lake).deliveries(None) for entry in delivery.entries]
    assert len(delivered) == log.height
    entries: dict[str, list[tuple[int, str]]] = {}
    for entry in delivered:
        entries.setdefault(entry["alert_id"], []).append((entry["sequence"], entry["kind"]))
    for found in entries.values():
        assert found == [(number // 2, ("insert", "retract")[number % 2]) for number in range(len(found))]


def is_unique(chain: Chain) -> None:
    """Each record is one row of its raw table or one dead letter, and each measurement is one observation."""
    frames = chain.pipeline.read().frames
    for name in ("observations", "associations"):
        assert frames[name]["observation_id"].is_unique().all()
    for frame in chain.raw_rows().values():
        assert frame.select("topic_partition", "topic_offset").is_unique().all()


def test_what_follows_from_a_decoder_error_is_corrected_from_raw(short_chain: Chain) -> None:
    """Expected is what the decoder itself makes of all bytes. Each row of it becomes an observation or is rejected."""
    pipeline = short_chain.pipeline
    received = [one for one in short_chain.simulated.records if one[0] == RADAR.source_kind]
    half = len(received) // 2
    values = [record.value for _, record in received]
    rows, reasons = decode_radar(pa.array(values, pa.binary()))
    is_good = reasons.is_null().to_pylist()
    decoded = pl.DataFrame(pl.from_arrow(rows)).filter(is_good)
    measurements = len({value for value, good in zip(values, is_good, strict=True) if good})
    damaged = len(values) - sum(is_good)
    assert damaged > 0

    def raw_is_right() -> bool:
        found = pipeline.rows(RADAR.raw_table).sort("topic_offset")
        names = [name for name in decoded.columns if name in found.columns]
        assert {"range_m", "range_rate_m_s", "timestamp_ns"} <= {*names}
        return found.select(names).equals(decoded.select(names))

    def rejected() -> pl.DataFrame:
        return pipeline.rows(REJECTED_OBSERVATIONS)

    def waiting_dead_letters() -> int:
        return pipeline.rows(DEAD_LETTERS[0]).filter(pl.col("reprocessed_in").is_null()).height

    short_chain.advance(received[:half], follow=False, kinds=kinds_with(decode_wrongly))
    # The decoder is corrected; what comes later is right.
    short_chain.advance(received[half:])
    since, until = short_chain.begins
    assert not raw_is_right()
    assert waiting_dead_letters() > damaged
    assert "time_beyond_skew" in set(rejected()["reason"])
    wrong, wrongly_associated = pipeline.rows(OBSERVATIONS), pipeline.rows(ASSOCIATIONS)
    assert set(wrongly_associated["observation_id"]) == set(wrong["observation_id"])
    assert short_chain.reprocess_from_raw(since, until) is RunState.PUBLISHED
    assert raw_is_right()
    assert waiting_dead_letters() == damaged
    launched = {name for name, _ in short_chain.follow()}
    assert launched == {"observations", "rejected_observations", "associations"}
    observed, associated = pipeline.rows(OBSERVATIONS), pipeline.rows(ASSOCIATIONS)
    assert "time_beyond_skew" not in set(rejected()["reason"])
    assert observed.height + rejected().height == measurements > wrong.height
    for frame in (observed, associated):
        assert frame["observation_id"].is_unique().all()
    assert set(associated["observation_id"]) == set(observed["observation_id"])

    def ranges(frame: pl.DataFrame, meters: pl.Expr) -> set[tuple[datetime, float]]:
        return {*frame.select("sensor_timestamp", meters.round(3)).iter_rows()}

    right = ranges(decoded, pl.col("range_m"))
    assert ranges(observed, pl.col("range_km") * 1_000) <= right
    assert not ranges(wrong, pl.col("range_km") * 1_000) <= right
    # Only what was associated wrongly changes.
    distance = ["observation_id", "normalized_distance"]
    kept = associated.select(distance).join(wrongly_associated.select(distance), on=distance, how="semi")
    assert 0 < kept.height < associated.height


# In `make test`, the test above ends at the associations. test_alerts.py shows that changed risks correct alerts.
@pytest.mark.soak
def test_a_decoder_error_is_corrected_from_raw_through_the_whole_chain(
    chain: Chain, empty_lake: Lakehouse
) -> None:
    received = chain.simulated.records
    half = len(received) // 2
    chain.advance(received[:half], kinds=kinds_with(decode_wrongly))
    # The decoder is corrected; what comes later is right.
    chain.advance(received[half:])
    since, until = chain.begins
    wrong, wrong_log = tables_of(chain), chain.pipeline.log()
    differing = {text.split(":")[0] for text in chain.expected.differences(wrong)}
    assert differing >= {"raw_radar", "dead_letters", "observations", "rejected_observations"}, differing
    assert differing >= {"associations", "tracks", "risks", "net_alerts"}, differing
    assert chain.reprocess_from_raw(since, until) is RunState.PUBLISHED
    runs = chain.follow()
    assert {name for name, _ in runs} >= {"observations", "rejected_observations", "conjunction_alerts"}
    differences = chain.expected.differences(tables_of(chain))
    assert not differences, "\n".join([f"seed {SEED}", *differences])
    is_unique(chain)
    log = chain.pipeline.log()
    is_consistent(log, empty_lake)
    # Entries are only added, and corrections keep the ids of alerts.
    assert log.join(wrong_log, on=["alert_id", "sequence", "kind"], how="semi").height == wrong_log.height
    added = log.join(wrong_log, on=["alert_id", "sequence", "kind"], how="anti")
    assert set(added["kind"]) == {"insert", "retract"}
    assert set(added.filter(kind="retract")["alert_id"]) <= set(wrong_log["alert_id"])
    # A repetition changes nothing.
    before = empty_lake.nessie.reference(MAIN).hash
    assert chain.reprocess_from_raw(since, until) is not RunState.PUBLISHED
    assert empty_lake.nessie.reference(MAIN).hash == before
    assert chain.follow() == []


@pytest.mark.soak
def test_reprocessed_dead_letters_make_no_alert_twice(chain: Chain, empty_lake: Lakehouse) -> None:
    """Of 10,000 dead letters most are copies of measurements that are there, and some are new."""
    received = chain.simulated.records
    radar = [number for number, (kind, _) in enumerate(received) if kind == RADAR.source_kind]
    _, reasons = decode_radar(pa.array([received[number][1].value for number in radar], pa.binary()))
    good = [radar[number] for number in np.flatnonzero(reasons.is_null().to_numpy(zero_copy_only=False))]
    held_back = {*good[::7]}
    chain.advance([one for number, one in enumerate(received) if number not in held_back])
    log, before = chain.pipeline.log(), tables_of(chain)
    assert log.height
    # The measurements that are there come again and again, and this decoder knows none of them.
    copies = [received[number] for number in good if number not in held_back]
    late = [received[number] for number in sorted(held_back)]
    again = (copies * (10_000 // len(copies) + 1))[: 10_000 - len(late)]
    for letters in (again, late):
        assert chain.advance(letters, kinds=kinds_with(refuse)) == []
    waiting = tables_of(chain).frames["dead_letters"]
    assert waiting.height == before.frames["dead_letters"].height + 10_000
    # Dead letters are selected by whole seconds of their receipt.
    between = f"{chain.begins[-1]:%Y-%m-%dT%H:%M:%S}"
    assert chain.reprocess("--until", between) is RunState.PUBLISHED
    assert {name for name, _ in chain.follow()} == {"observations", "rejected_observations"}
    assert chain.pipeline.log().equals(log)
    expected = Tables({name: before.frames[name] for name in COMPUTED})
    assert not expected.differences(tables_of(chain))
    assert chain.pipeline.rows(RADAR.raw_table).height == before.frames["raw_radar"].height + len(again)
    # The measurements that are new correct tracks, risks and alerts.
    assert chain.reprocess("--since", between) is RunState.PUBLISHED
    assert {name for name, _ in chain.follow()} >= {"observations", "associations"}
    expected = Tables({name: chain.expected.frames[name] for name in COMPUTED})
    differences = expected.differences(tables_of(chain))
    assert not differences, "\n".join([f"seed {SEED}", *differences])
    assert waiting.height - 10_000 == chain.pipeline.read().frames["dead_letters"].height
    corrected = chain.pipeline.log()
    is_consistent(corrected, empty_lake)
    assert corrected.join(log, on=["alert_id", "sequence", "kind"], how="semi").height == log.height
    is_unique(chain)
