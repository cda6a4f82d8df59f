from __future__ import annotations

import inspect
import os
import subprocess
from pathlib import Path
from unittest.mock import patch

import dagster as dg
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from branchlake_dagster.runs.branch_owner import load_instance_id
from branchlake_dagster_tests.dagster_internals import SqliteEventLogStorage
from branchlake_dagster_tests.suite.instances import new_instance


@dg.asset
def one() -> int:
    return 1


def test_each_is_another_instance_and_knows_nothing_of_the_one_before() -> None:
    ids, homes = [], []
    for _ in range(2):
        with new_instance() as instance:
            assert os.environ["DAGSTER_HOME"] == instance.root_directory
            assert instance.get_runs() == []
            assert dg.materialize([one], instance=instance).success
            assert len(instance.get_runs()) == 1
            ids.append(load_instance_id(instance))
            homes.append(Path(instance.root_directory))
    assert len(set(ids)) == 2
    assert None not in ids
    assert not [home for home in homes if home.exists()]


def test_it_is_what_dagster_makes() -> None:
    with new_instance() as copied, dg.instance_for_test() as made:
        for kind in ("run_storage", "event_log_storage", "schedule_storage"):
            assert type(getattr(copied, kind)) is type(getattr(made, kind))
        assert copied.get_settings("telemetry") == made.get_settings("telemetry")
        schema = "select name, sql from sqlite_master order by name"
        with copied.run_storage.connect() as one, made.run_storage.connect() as other:
            read = [[tuple(row) for row in at.exec_driver_sql(schema)] for at in (one, other)]
            migrated = [
                sorted(at.exec_driver_sql("select name from secondary_indexes").scalars())
                for at in (one, other)
            ]
        assert read[0] == read[1]
        assert migrated[0] == migrated[1] != []


def test_the_database_of_a_run_is_what_dagster_makes() -> None:
    with new_instance() as copied:
        runs = [dg.materialize([one], instance=copied).run_id for _ in range(2)]
        storage = copied.event_log_storage
        read = []
        for run_id in runs:
            with storage.run_connection(run_id) as at:
                schema = at.exec_driver_sql("select name, sql from sqlite_master order by name").all()
                revision = at.exec_driver_sql("select version_num from alembic_version").scalar()
                mode = at.exec_driver_sql("pragma journal_mode").scalar()
                numbers = at.exec_driver_sql("select distinct run_id from event_logs").scalars().all()
            assert numbers == [run_id]
            read.append((schema, revision, mode))
        folder = Path(copied.root_directory, "made")
        made = create_engine(f"sqlite:///{folder}", poolclass=NullPool)
        unpatched = inspect.getclosurevars(SqliteEventLogStorage._initdb).nonlocals["make"]
        unpatched(storage, made)
        with made.connect() as at:
            schema = at.exec_driver_sql("select name, sql from sqlite_master order by name").all()
            revision = at.exec_driver_sql("select version_num from alembic_version").scalar()
            mode = at.exec_driver_sql("pragma journal_mode").scalar()
    assert read == 2 * [(schema, revision, mode)]
    assert mode == "wal"


def test_no_database_waits_for_the_disk() -> None:
    with new_instance() as instance:
        dg.materialize([one], instance=instance)
        storage = instance.event_log_storage
        for open_one in (
            instance.run_storage.connect,
            storage.index_connection,
            instance.schedule_storage.connect,
        ):
            with open_one() as at:
                assert at.exec_driver_sql("pragma synchronous").scalar() == 0


def test_its_runs_start_no_process() -> None:
    with new_instance() as instance, patch.object(subprocess, "Popen") as started:
        assert dg.materialize([one], instance=instance).success
    started.assert_not_called()
