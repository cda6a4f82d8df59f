"""`python -m branchlake_dagster_tests.baseline.write`: write the stored lake anew, with today's code.

Takes some minutes (five on a busy machine), and needs Spark. Do it only when something new is stored: the old files are what a
restructuring of the code is proved with.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import dagster as dg

from branchlake_dagster.automation.backfill_stages import launch_again, launch_backfill
from branchlake_dagster.ingest.reprocessing import DeadLetterSelection
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieUnavailable
from branchlake_dagster.nessie.model import IcebergTable
from branchlake_dagster.publication.parked_runs import MAX_ATTEMPTS
from branchlake_dagster.runs.branch_owner import build_batch_branch_name, load_instance_id
from branchlake_dagster.runs.discarding import claim_branch, discard_branch
from branchlake_dagster.runs.heartbeats import HeartbeatStore, build_heartbeat
from branchlake_dagster.runs.run_branch import ensure_main_has_commit, run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.baseline.names import stored_names
from branchlake_dagster_tests.baseline.opened import AUTOMATION, Opened, key, opened
from branchlake_dagster_tests.baseline.storage import (
    BUCKET,
    EXPECTED,
    STORED,
    client_of,
    object_store,
    pack,
    settings_of,
)
from branchlake_dagster_tests.harness import retry
from branchlake_dagster_tests.publication.reconcile.test_recheck import check_run

_BACKFILL_DAY, _OTHER_DAY = "2026-08-01", "2026-08-04"


def published(p: Opened, *path: str, partition: str | None = None, **options: Any) -> str:
    """Run assets of the shop and publish the run; its id."""
    run_id = p.run(*map(key, path), partition=partition, **options)
    outcome = p.settle(run_id)
    assert outcome.state is RunState.PUBLISHED, outcome
    return run_id


def write(p: Opened, *, blocked: Opened, fallback: Opened) -> dict[str, Any]:
    """Everything that is stored; the runs by what has become of them.

    `blocked` is the same lake for runs whose branches are kept when they fail, `fallback` for runs that write
    to `main` when their branch cannot be made.
    """
    found: dict[str, Any] = {}
    # Published, by every write mode.
    for name in ("prices", "visits", "visits", "customers", "orders"):
        found[f"published_{name}"] = published(p, name)
    p.shop.price = 2
    for name in ("prices", "customers"):
        found[f"published_{name}"] = published(p, name)
    for day in ("2026-08-01", "2026-08-02"):
        published(p, "sales", partition=day)
    for _ in range(2):
        found["published_stock"] = published(p, "stock", partition="north")
        found["published_readings"] = published(p, "readings", partition="2026-08-01|north")
    # Two runs from one commit: the second is rebased.
    earlier = p.run(key("sales"), partition="2026-08-03")
    later = p.run(key("sales"), partition="2026-08-04")
    for run_id in (earlier, later):
        assert p.settle(run_id).state is RunState.PUBLISHED
    found["rebased"] = later
    # Exclusive, twice: the second token.
    for _ in range(2):
        found["published_ledger"] = published(p, "ledger")
    # Consumers with positions, and then a backlog.
    found["consumed"] = published(p, "copies")
    published(p, "visits")
    for day in ("2026-08-01", "2026-08-02"):
        published(p, "sums", partition=day)
    published(p, "sales", partition="2026-08-02")
    published(p, "latest")
    published(p, "sales", partition="2026-08-03")
    published(p, "latest")
    found |= write_ingestion(p)
    found |= write_requested(p)
    found |= write_backfill(p)
    cursors = {one.name: p.tick(one.name, None).cursor for one in p.sensors()}
    cursors[AUTOMATION] = p.evaluated()
    found["repeated"] = repeated(p)
    published(p, "own")
    found["backlog"] = published(p, "visits")
    found["unbranched"] = unbranched(fallback)
    # Unpublished runs.
    p.shop.price = -1
    found["blocked"] = blocked.run(key("prices"), ok=True)
    outcome = blocked.settle(found["blocked"])
    assert outcome.state is RunState.BLOCKED, outcome
    p.shop.price = 3
    found["checked_again"] = checked_again(p)
    found["parked"] = parked(p)
    found["fenced"] = p.run(key("stock"), partition="south")
    discard_branch(p.lake.nessie, p.lake.nessie.reference(run_branch_name(found["fenced"])))
    p.shop.failing.add("second")
    found["failed"] = p.run(key("first"), key("second"), ok=False)
    assert p.settle(found["failed"]).state is RunState.DISCARDED
    gone = p.run(key("first"), key("second"), ok=False)
    p.shop.failing.clear()
    found["retried"] = retry(p, gone, assets=[key("first"), key("second")])
    assert p.settle(found["retried"]).state is RunState.PUBLISHED
    found["sweeping"] = sweeping(p)
    one, other = p.run(key("prices")), p.run(key("prices"))
    assert p.settle(one).state is RunState.PUBLISHED
    assert p.settle(other).state is RunState.REFUSED
    found["refused"] = other
    found["waiting_own"] = p.run(key("own"))
    # Published by the one that continues, with a claim of a publisher that died.
    p.shop.price = 7
    found["waiting"] = p.run(key("prices"))
    claim_branch(p.lake.nessie, p.lake.nessie.reference(run_branch_name(found["waiting"])))
    found["live_batch"] = build_batch_branch_name(
        found["live"], load_instance_id(p.instance), now=datetime.now(UTC), random_id=uuid4()
    )
    head = p.lake.nessie.reference(MAIN).hash
    p.lake.nessie.create_branch(found["live_batch"], from_ref=MAIN, from_hash=head)
    found["leased"] = p.run(key("ledger"))
    beat = build_heartbeat(run_branch_name(found["leased"]), run_id=found["leased"], interval_s=10.0)
    HeartbeatStore.from_settings(p.lake.settings).write(
        replace(beat, counter=1, written_at=datetime.now(UTC))
    )
    for sensor in p.sensors():
        if sensor.name == "publication_sensor":
            continue  # it would publish what is to wait
        cursors[sensor.name] = p.tick(sensor.name, cursors[sensor.name]).cursor
    for name, cursor in cursors.items():
        p.store_cursor(name, cursor)
    return found


def write_ingestion(p: Opened) -> dict[str, Any]:
    """Batches as runs, dead letters put back, a batch of the live job, and records that wait."""
    p.land({"id": 1, "kind": "a"}, {"id": 2, "kind": "b"}, b"no record", {"id": 3, "kind": "a", "more": 1})
    first = p.ingest()
    assert p.settle(first).state is RunState.PUBLISHED
    again = p.ingest(tags={RunTag.REPROCESS: DeadLetterSelection().to_tag()})
    assert p.settle(again).state is RunState.PUBLISHED
    p.land({"id": 4, "kind": "a"}, {"id": 5, "kind": "b"})
    config = {"ops": {"ingest_events_batches": {"config": {"run_s": 0.1, "interval_s": 0.0}}}}
    live = p.ingest(job="live", run_config=config)
    p.land({"id": 6, "kind": "a"}, {"id": 7, "kind": "c"})
    return {"ingested": first, "reprocessed": again, "live": live}


def write_backfill(p: Opened) -> dict[str, Any]:
    """A backfill whose first stage is published and waits for approval."""
    number = launch_backfill(
        p.graph,
        p.instance,
        key("sales"),
        [_BACKFILL_DAY, _OTHER_DAY],
        reason="a new price",
        base_hash=p.lake.nessie.reference(MAIN).hash,
        approval=True,
        requested_at=time.time(),
    )
    backfill = p.instance.get_backfill(number)
    assert backfill is not None
    tags = {**backfill.tags, "dagster/backfill": number}
    unapproved = published(p, "sales", partition=_BACKFILL_DAY, tags=tags)
    # Somebody goes on by hand with the other day: that result waits for approval as well.
    published(p, "sales", partition=_OTHER_DAY, tags=tags)
    following = published(p, "sums", partition=_OTHER_DAY)
    again = launch_again(
        p.graph,
        p.instance,
        key("sales"),
        [_OTHER_DAY],
        backfill_id=number,
        rebuild=True,
        approval=True,
        requested_at=time.time(),
    )
    return {"backfill": number, "unapproved": unapproved, "following": following, "backfill_retry": again}


def write_requested(p: Opened) -> dict[str, Any]:
    """Runs that sensors request: after a publication, and for a consumer, whose first run fails."""
    cursor = p.tick("after_visits", None).cursor
    followed_run = published(p, "visits")
    (after,) = p.tick("after_visits", cursor).run_requests
    followed = p.requested(after)
    assert p.settle(followed).state is RunState.PUBLISHED
    p.shop.failing.add("copies")
    p.settle(p.requested(_for(p, "copies"), ok=False))
    p.shop.failing.clear()
    again = p.requested(_for(p, "copies"))
    assert p.settle(again).state is RunState.PUBLISHED
    published(p, "visits")
    return {"followed_run": followed_run, "followed": followed, "consumed": again}


def _for(p: Opened, name: str) -> dg.RunRequest:
    """What the incremental sensor requests for an asset."""
    (found,) = [
        one for one in p.tick("incremental_sensor", None).run_requests if one.asset_selection == [key(name)]
    ]
    assert isinstance(found, dg.RunRequest)
    return found


def repeated(p: Opened) -> str:
    """A run whose step was repeated after it had written, and another writer too: its first rows are undone."""
    published(p, "repeated")
    before = {ref.name for ref in p.lake.nessie.references()}

    def other_writer() -> None:
        (branch,) = {ref.name for ref in p.lake.nessie.references()} - before
        table = p.lake.catalog(branch).load_table(("shop", "repeated"))
        table.append(p.shop.rows().to_arrow())

    p.shop.interrupt = other_writer
    run_id = p.run(key("repeated"))
    p.settle(run_id)
    return run_id


def checked_again(p: Opened) -> str:
    """A run whose rebased table is to be checked again: its publication is prepared. One before it was."""
    first, second, third = (p.run(key("orders")) for _ in range(3))
    assert p.settle(first).state is RunState.PUBLISHED
    check_run(p, p.settle(second))
    assert p.settle(second).state is RunState.PUBLISHED
    assert p.settle(third).state is RunState.CHECKING
    return third


def sweeping(p: Opened) -> str:
    """A discarded run whose files were being deleted when the sweeper died."""
    run_id = p.run(key("stock"), partition="south")
    tag = discard_branch(p.lake.nessie, p.lake.nessie.reference(run_branch_name(run_id)))
    assert tag is not None
    p.lake.nessie.create_tag(f"sweeping-{run_id}", from_ref=MAIN, from_hash=tag.hash)
    p.lake.nessie.delete_tag(tag.name, expected_hash=tag.hash)
    return run_id


def parked(p: Opened) -> str:
    """A run that was set aside, whose trouble has passed since."""
    run_id = p.run(key("readings"), partition="2026-08-02|south")
    table = p.lake.catalog(run_branch_name(run_id)).load_table(("shop", "readings"))
    endpoint = p.lake.settings.s3_endpoint
    assert endpoint is not None
    where = {"Bucket": BUCKET, "Key": table.metadata_location.removeprefix(f"s3://{BUCKET}/")}
    now = [datetime.now(UTC)]
    with client_of(endpoint) as client:
        whole = client.get_object(**where)["Body"].read()
        client.put_object(**where, Body=b"")
        for _ in range(MAX_ATTEMPTS):
            p.reconciler(now=lambda: now[0]).reconcile_run(run_id)
            now[0] += timedelta(days=1)
        client.put_object(**where, Body=whole)
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    assert run.tags[RunTag.NEXT_ATTEMPT] == RunState.PARKED, run.tags.get(RunTag.REASON)
    return run_id


def unbranched(p: Opened) -> str:
    """A run that wrote to `main` because its branch could not be made."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise NessieUnavailable("no branches today", status=503)

    with patch.object(NessieClient, "create_branch", refuses):
        run_id = p.run(key("stock"), partition="north")
    list(p.reconciler().reconcile_branches())
    return run_id


def tables_on_main(p: Opened) -> dict[str, list[int]]:
    """By table the sorted ids of its rows, the number of rows where there is no id."""
    found = {}
    for entry in p.lake.nessie.entries(MAIN, fetch_content=True):
        if isinstance(entry.content, IcebergTable):
            rows = p.lake.catalog(MAIN).load_table(tuple(entry.key.elements)).scan().to_arrow()
            ids = rows["id"].to_pylist() if "id" in rows.column_names else [None] * rows.num_rows
            found[entry.key.name] = sorted(ids, key=str)
    return found


def main() -> None:
    """Write `stored.tar.xz` and `expected.json` beside this module."""
    for name, value in {"GUARD_NESSIE": "false", "STARTUP_TIMEOUT_S": "240"}.items():
        os.environ[f"BRANCHLAKE_{name}"] = value
    folder = Path(tempfile.mkdtemp(prefix="branchlake-baseline-"))
    with object_store() as endpoint, settings_of(folder / "state", endpoint) as settings:
        with opened(settings, spark=True) as p:
            ensure_main_has_commit(p.lake.nessie)
            blocked = p.with_settings(keep_failed_hours=settings.discard_grace_h)
            fallback = p.with_settings(when_unavailable="direct_main")
            runs = write(p, blocked=blocked, fallback=fallback)
            expected = {
                "runs": runs,
                "main": p.lake.nessie.reference(MAIN).hash,
                "tables": tables_on_main(p),
                "references": sorted(ref.name for ref in p.lake.nessie.references()),
                "cursors": p.cursors(),
                "names": stored_names(p, endpoint),
            }
        pack(settings.state_dir, endpoint, STORED)
    EXPECTED.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(folder)
    print(f"{STORED.name}: {STORED.stat().st_size / 1e6:.2f} MB")  # noqa: T201 - a command


if __name__ == "__main__":
    main()
