"""Every name under which the product stores something is in the stored lake, and still in the code.

A name that is renamed in the code alone fails here: data that users have under the old one would be lost. A new one
fails too, until `python -m branchlake_dagster_tests.baseline.write` has stored it, or it is listed here with a reason.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from branchlake_dagster.runs.run_tags import RECORDED_STATES
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster_tests.baseline.names import names_in_code
from branchlake_dagster_tests.baseline.storage import EXPECTED, STORED

NAMES: dict[str, list[str]] = json.loads(EXPECTED.read_text())["names"]
"""By kind, what the stored lake holds."""
STORED_NAMES = {name for names in NAMES.values() for name in names}
PREFIXES = ("branchlake.", "branchlake/", ".dagster/branchlake_", "_branchlake/")

SHOWN_ALONE = {
    *("branchlake/dropped", "branchlake/dropped_", "branchlake/handed_over", "branchlake/received"),
    *("branchlake/receiver_buffer_used", "branchlake/receiver_buffered", "branchlake/receivers_silent"),
    *("branchlake/state", "branchlake/topics"),  # counts of receivers
    *("branchlake/failing_partitions", "branchlake/wanted_through"),  # of checks
    "branchlake/expired_records",  # of kept records
    *("branchlake/days", "branchlake/day_rows_added", "branchlake/day_rows_removed"),  # of ingested tables
    "branchlake/rows_outside_days",
    *("branchlake/notes", "branchlake/upsert_by_spark_because", "branchlake/waits_for_partition"),
}
"""Metadata that people see on Dagster's pages, and that no code reads back."""
NOT_STORED = {
    "_branchlake/changes": "a change table's folder; it goes with the branch of its run",
    "_branchlake/garbage_collection": "on a collected lake, which version 0.1.0 did not have",
    "_branchlake/repositories": "on a lake that has written, which version 0.1.0 did not record",
    "branchlake.journal_id": "on the journal of a collection, which version 0.1.0 did not have",
    "_branchlake/doctor": "what `branchlake doctor` writes and removes",
    ".dagster/branchlake_reported": "on a run while a publisher reports many partitions, gone afterwards",
    ".dagster/branchlake_worker": "on a run while its process lives, and of no use after that",
    "branchlake.change_of": "on a change table, which goes with the branch of its run",
    "branchlake.expired_snapshots": "on an expiry, which version 0.1.0 did not have",
    "branchlake.expiry_id": "on an expiry, which version 0.1.0 did not have",
    "branchlake.undone_publications": "on an undo, which version 0.1.0 did not have",
    "branchlake.undone_runs": "on an undo, which version 0.1.0 did not have",
    "branchlake.undone_snapshots": "on an undo, which version 0.1.0 did not have",
    "branchlake.undone_superseded_by": "on an undo, which version 0.1.0 did not have",
    "branchlake.maintenance": "on a compaction, which version 0.1.0 did not have",
    "branchlake.reversed_snapshots": "on a run that a compaction met, which version 0.1.0 did not have",
    "branchlake/undone_by": "on an undo, which version 0.1.0 did not have",
    "branchlake/stale_since": "on an undo, which version 0.1.0 did not have",
    "branchlake/stale_inputs": "on an undo, which version 0.1.0 did not have",
    "branchlake/watched_assets": "on a sensor's definition, which Dagster loads anew from the code",
    "branchlake.code_attempt": "on a snapshot of a run's Spark session, which version 0.1.0 did not record",
    "branchlake.when_matched": "on an upsert, which version 0.1.0 did not record",
    "branchlake.kept_since.": "on a table of kept records, of an ingestion that keeps them; set anew each day",
    "branchlake/reprocess_raw": "on a run that decodes kept records again, and of no use after it",
    "branchlake/read_untold": "on a run that read by Spark what its plan does not name",
    "branchlake/when_matched": "on an asset's definition, which Dagster loads anew from the code",
    "branchlake/spark_application": "on a run whose code used Spark, which version 0.1.0 did not record",
    "branchlake/stored_rows": "marks a type of Dagster in the memory of a process",
}
"""Names that the stored lake does not have, with the reason."""
IN_PARTS = {
    "branchlake.lease-": "put together by runs.leases",
}
"""Stored names that the code has in parts that are not constants."""


@pytest.fixture(scope="module")
def in_code() -> dict[str, set[str]]:
    return names_in_code()


@pytest.mark.long
def test_every_stored_name_is_in_the_code(in_code: dict[str, set[str]]) -> None:
    ours = {name for name in STORED_NAMES if name.startswith(PREFIXES)}
    assert ours - set(in_code) - set(IN_PARTS) == set()


@pytest.mark.long
def test_every_name_in_the_code_is_stored(in_code: dict[str, set[str]]) -> None:
    product = {
        name
        for name, modules in in_code.items()
        if name.startswith(PREFIXES) and not all(".bench." in module for module in modules)
    }
    assert product - STORED_NAMES - SHOWN_ALONE - set(NOT_STORED) == set()


@pytest.mark.long
def test_the_exceptions_are_needed(in_code: dict[str, set[str]]) -> None:
    assert (SHOWN_ALONE | set(NOT_STORED)) & STORED_NAMES == set()
    assert (SHOWN_ALONE | set(NOT_STORED)) - set(in_code) == set()
    assert set(IN_PARTS) - STORED_NAMES == set()


def test_references_have_their_prefixes() -> None:
    stored = {*NAMES["branch prefix"], *NAMES["tag prefix"]}
    assert stored == {
        ReferencePrefix.RUN,
        ReferencePrefix.PUBLICATION,
        ReferencePrefix.DISCARDED,
        ReferencePrefix.SWEEPING,
        ReferencePrefix.CLAIM,
    }


def test_stored_words_of_the_status_tag_are_still_known() -> None:
    assert {*NAMES["status"]} - {"none"} <= {str(one) for one in RECORDED_STATES}


def test_the_stored_lake_is_small() -> None:
    assert STORED.stat().st_size < 2_000_000


# -- how the code is read ------------------------------------------------------------------------------


def test_names_that_are_put_together_are_found(tmp_path: Path) -> None:
    package = tmp_path / "product"
    (package / "inner").mkdir(parents=True)
    (package / "names.py").write_text(
        'PREFIX = "branchlake."\nRUN = f"{PREFIX}run"\nSTEP = PREFIX + "step"\n'
    )
    (package / "inner" / "__init__.py").write_text('FOLDER = "_branchlake/here"\n')
    (package / "inner" / "use.py").write_text(
        "from product.names import PREFIX as P, RUN\n"
        "from product import names\n"
        'def use(key, root):\n    return [P + "a", f"{P}offsets.{key}", f"{RUN}.{key}", f"{names.PREFIX}b",\n'
        '            f"{root}/_branchlake/there/{key}", "branchlake/tag", "a sentence about branchlake.x"]\n'
    )
    found = names_in_code(package)
    assert found.keys() == {
        *("branchlake.run", "branchlake.step", "branchlake.a", "branchlake.offsets.", "branchlake.b"),
        *("branchlake.run.", "branchlake/tag", "_branchlake/here", "_branchlake/there"),
    }
    assert found["branchlake.run"] == {"product.names"}
