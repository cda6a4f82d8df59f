"""Tests that only `make test-soak` runs.

They repeat what another test shows: more variants of a parameter, more rounds, more faults.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from branchlake_dagster_tests.suite.durations import FOLDER

MARKER = "soak"
VARIABLE = "BRANCHLAKE_TEST_SOAK"
SLOW = frozenset(
    {
        "branching/io/test_spark_io.py::test_classic_spark_end_to_end",
        "cli/test_new.py::test_a_scaffolded_component_brings_the_machinery",
        "cli/test_receive.py::test_the_bench_accounts_for_every_record",
        "sda/test_foreign_hands.py::test_whoever_writes_the_list_is_that_of_the_catalogue",
        "sda/test_registry_lake.py::test_ten_writers_at_once_publish_what_one_after_the_other_would",
        "incremental/backfill/test_backfill_by_daemon.py::test_a_stage_that_failed_is_launched_again_by_the_command",
        "incremental/test_spark_changes.py::test_a_process_killed_before_its_write_leaves_nothing_and_takes_no_file_along",
        "ingest/test_batches.py::test_every_new_field_of_a_batch_becomes_a_column",
        "ingest/test_live.py::test_it_takes_no_snapshots_out_any_more_when_it_meets_another_writer",
        "ingest/test_live.py::test_spark_bounds_the_bytes_it_sends_to_workers_unless_records_are_small",
        "ingest/test_mutations.py::test_columns_may_have_the_names_of_ours",
        "ingest/test_mutations.py::test_of_two_partitions_the_later_record_counts",
        "ingest/test_named_tables.py::test_a_live_run_tells_of_each_table",
        "ingest/test_named_tables.py::test_a_table_that_somebody_else_fills_is_not_taken",
        "ingest/test_named_tables.py::test_letters_for_which_there_was_no_table_are_put_back",
        "ingest/test_named_tables.py::test_rows_take_each_others_place_in_tables_that_records_name",
        "ingest/test_named_tables.py::test_tables_are_not_made_where_that_is_not_allowed",
        "ingest/test_put_back.py::test_a_replay_reads_nothing_again_that_was_put_back",
        "ingest/test_put_back.py::test_letters_are_put_back_while_the_rows_of_a_roll_back_are_left_out",
        "ingest/test_put_back.py::test_letters_whose_marks_were_rolled_back_are_not_put_back_twice",
        "ingest/test_reprocess.py::test_a_letter_that_finds_no_table_stays_its_tables",
        "ingest/test_reprocess.py::test_a_table_that_is_filled_again_leaves_waiting_letters_alone",
        "ingest/test_runs.py::test_a_record_that_fails_its_batch_is_a_dead_letter_of_the_run",
        "ingest/test_runs.py::test_a_run_tells_of_the_tables_that_its_records_name",
        "ingest/test_runs.py::test_a_second_attempt_to_put_letters_back_is_judged_by_them_too",
        "ingest/test_unwritable.py::test_a_table_that_is_filled_again_gets_no_second_dead_letter",
        "ingest/test_unwritable.py::test_what_a_search_does_not_reach_waits_for_the_next_batch",
        "lakehouse/test_archives.py::test_a_recorded_nessie_is_mapped_by_the_next_one",
        "publication/automation/test_backfill_daemon.py::test_two_runs_meet_and_the_daemon_repeats_the_check",
        "publication/cleanup/test_killed_daemon.py::test_a_run_that_died_with_its_code_server_ends_by_itself",
        "publication/cleanup/test_killed_runs.py::test_a_cancelled_run_leaves_nothing",
        "publication/cleanup/test_killed_runs.py::test_a_run_that_dies_outside_of_its_steps_is_missed_too",
        "remote/test_remote.py::test_the_graph_is_published_on_the_whole_stack",
        "ui/test_ui.py::test_a_blocked_launch_is_red_and_says_why",
    }
)
"""Tests of a quarter of a minute and more that are left out too, so that `make test` ends in time."""


def is_left_out(marks: Sequence[str], *, expression: str, soaking: bool) -> bool:
    """Whether a test with these marks is deselected.

    `expression` is the value of `-m`; one that names the marker decides by itself.
    """
    return MARKER in marks and not soaking and MARKER not in expression


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the tests that are left out from `items`, and report them to pytest as deselected."""
    expression, soaking = str(config.option.markexpr), bool(os.environ.get(VARIABLE))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        if item.nodeid.removeprefix(FOLDER).partition("[")[0] in SLOW:
            item.add_marker(MARKER)
        marks = [mark.name for mark in item.iter_markers()]
        (left_out if is_left_out(marks, expression=expression, soaking=soaking) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
