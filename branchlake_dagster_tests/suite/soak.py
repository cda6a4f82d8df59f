"""Tests that only `make test-soak` runs.

Each repeats the proof of another test with more variants of a parameter, more rounds or more faults.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from branchlake_dagster_tests.suite.durations import FOLDER

MARKER = "soak"
COLLECTED: pytest.StashKey[frozenset[str]] = pytest.StashKey()
"""All collected tests before any was deselected, relative to the tests' folder."""
VARIABLE = "BRANCHLAKE_TEST_SOAK"
SLOW = frozenset(
    {
        "runs/test_reference_names.py::test_odd_names_of_tables_and_columns[polars-upsert]",
        "runs/test_reference_names.py::test_odd_names_of_tables_and_columns[spark-append]",
        "runs/test_reference_names.py::test_odd_names_of_tables_and_columns[spark-replace_partitions]",
        "io_manager/test_spark_io.py::test_a_spark_frame_widens_its_table_and_fits_a_wider_one[append]",
        "io_manager/test_spark_io.py::test_an_upsert_that_keeps_known_keys_finds_them_in_the_hour_that_a_zone_has_twice[UTC]",
        "io_manager/test_spark_io.py::test_an_upsert_that_keeps_known_keys_refuses_a_frame_that_is_computed_twice_with_other_times[no row]",
        "io_manager/test_spark_io.py::test_classic_spark_end_to_end",
        "tables/test_time_windows_lake.py::test_a_date_column_is_read_and_written_by_the_calendar_of_the_partitions[America/New_York]",
        "tables/test_time_windows_lake.py::test_a_window_that_shares_files_with_its_neighbours_is_replaced_alone[days of a half-hour zone-polars_asset]",
        "tables/test_time_windows_lake.py::test_a_window_that_shares_files_with_its_neighbours_is_replaced_alone[quarters of an hour-spark_asset]",
        "incremental/test_incremental_assets.py::test_running_totals_are_computed_from_the_smallest_change_on[column1]",
        "incremental/test_incremental_assets.py::test_two_runs_of_one_consumer_cannot_both_be_published[real]",
        "incremental/test_removed_rows.py::test_a_row_that_moves_to_another_partition[2026-01-01-False-rows]",
        "incremental/test_removed_rows.py::test_a_row_that_moves_to_another_partition[2026-01-01-True-keys]",
        "incremental/test_removed_rows.py::test_a_row_that_moves_to_another_partition[2026-01-01-True-rows]",
        "history/test_capture.py::test_the_cache_is_bounded_by_the_memory_that_files_take[10-text2]",
        "checks/proof/test_proof_stack.py::test_what_is_proved_of_sparks_tables_is_true[1]",
        "checks/proof/test_proof_stack.py::test_what_is_proved_of_sparks_tables_is_true[2]",
        "checks/proof/test_proof_stack.py::test_what_is_proved_of_sparks_tables_is_true[3]",
        "checks/test_judge.py::test_verdicts_equal_panderas[1]",
        "cli/test_new.py::test_a_scaffolded_component_brings_the_machinery",
        "cli/test_new.py::test_launched_by_dg_and_published",
        "cli/test_receive.py::test_the_bench_accounts_for_every_record",
        "cli/test_receive.py::test_what_was_accepted_is_in_the_files_after_a_signal[2]",
        "incremental/test_reach.py::test_a_late_row_changes_all_results_that_depend_on_it[mapping-two_days_in_spark-DataFrame]",
        "incremental/test_reach.py::test_a_late_row_changes_all_results_that_depend_on_it[widen without partitions-two_days-DataFrame]",
        "incremental/test_reach.py::test_a_late_row_changes_all_results_that_depend_on_it[widen-two_days_in_spark-DataFrame]",
        "incremental/test_real_histories.py::test_what_spark_changes_between_any_two_states[one delete file for a partition]",
        "incremental/test_redefinition.py::test_the_own_table_is_rolled_back_while_a_run_is_at_work[2026-08-02]",
        "incremental/test_spark_changes.py::test_a_process_killed_before_its_write_leaves_nothing_and_takes_no_file_along",
        "ingest/secured/test_secured.py::test_a_wrong_password[PLAIN]",
        "ingest/test_batches.py::test_every_new_field_of_a_batch_becomes_a_column",
        "ingest/test_hostile_records.py::test_a_field_that_cannot_be_a_column_stops_no_batch[found-together]",
        "ingest/test_hostile_records.py::test_a_record_time_that_spark_cannot_hold_stops_no_batch",
        "ingest/test_kept_records.py::test_only_rows_that_differ_are_changes",
        "ingest/test_kept_records.py::test_records_move_to_tables_that_they_name_now[1]",
        "ingest/test_kept_records.py::test_records_that_arrive_meanwhile_are_kept[1]",
        "ingest/test_live.py::test_a_record_that_fails_its_batch_is_published_as_a_dead_letter_with_the_others",
        "ingest/test_live.py::test_a_table_that_is_rolled_back_meanwhile_is_filled_again",
        "ingest/test_live.py::test_it_takes_no_snapshots_out_any_more_when_it_meets_another_writer",
        "ingest/test_live.py::test_spark_bounds_the_bytes_it_sends_to_workers_unless_records_are_small",
        "ingest/test_mutations.py::test_columns_may_have_the_names_of_branchlakes_columns",
        "ingest/test_mutations.py::test_of_two_partitions_the_later_record_counts",
        "ingest/test_mutations.py::test_the_key_of_a_record_identifies_its_row_and_a_tombstone_deletes_it[upsert]",
        "ingest/test_named_tables.py::test_a_live_run_reports_each_table",
        "ingest/test_named_tables.py::test_a_table_that_somebody_else_fills_is_not_taken",
        "ingest/test_named_tables.py::test_columns_are_found_in_the_records_of_each_table",
        "ingest/test_named_tables.py::test_dead_letters_without_a_table_are_reprocessed",
        "ingest/test_named_tables.py::test_rows_take_each_others_place_in_tables_that_records_name",
        "ingest/test_named_tables.py::test_tables_are_not_made_where_that_is_not_allowed",
        "ingest/test_rolled_back_reprocessing.py::test_a_replay_reads_nothing_again_that_was_reprocessed",
        "ingest/test_rolled_back_reprocessing.py::test_dead_letters_are_reprocessed_while_the_rows_of_a_roll_back_are_left_out",
        "ingest/test_rolled_back_reprocessing.py::test_dead_letters_whose_marks_were_rolled_back_are_not_reprocessed_twice",
        "ingest/test_reprocess.py::test_a_dead_letter_that_finds_no_table_stays_its_tables",
        "ingest/test_reprocess.py::test_a_table_that_is_filled_again_leaves_waiting_dead_letters_alone",
        "ingest/test_reprocess.py::test_late_commits_of_an_earlier_attempt_are_not_reprocessed_twice",
        "ingest/test_runs.py::test_a_record_that_fails_its_batch_is_a_dead_letter_of_the_run",
        "ingest/test_runs.py::test_a_run_reports_the_tables_that_its_records_name",
        "ingest/test_runs.py::test_a_second_attempt_to_reprocess_dead_letters_is_judged_by_them_too",
        "ingest/test_unwritable.py::test_a_table_that_is_declared_wrongly_makes_no_dead_letters[found]",
        "ingest/test_unwritable.py::test_a_table_that_is_filled_again_gets_no_second_dead_letter",
        "ingest/test_unwritable.py::test_what_a_search_does_not_reach_waits_for_the_next_batch",
        "embedded/test_archives.py::test_a_recorded_nessie_is_mapped_by_the_next_one",
        "embedded/test_python_workers.py::test_who_imports_otherwise_is_an_ordinary_daemon[OMP_NUM_THREADS]",
        "automation/test_backfill_daemon.py::test_a_backfill_into_a_new_table_publishes_every_partition_unaided",
        "automation/test_backfill_daemon.py::test_two_runs_meet_and_the_daemon_repeats_the_check",
        "cleanup/test_killed_daemon.py::test_a_run_that_died_with_its_code_server_ends_by_itself",
        "cleanup/test_killed_runs.py::test_a_cancelled_run_leaves_nothing",
        "cleanup/test_killed_runs.py::test_a_killed_run_is_found_dead_and_leaves_nothing",
        "cleanup/test_killed_runs.py::test_a_run_that_dies_outside_of_its_steps_is_missed_too",
        "publication/commit/test_concurrent_publishers.py::test_1_a_lost_reply_at_any_step_ends_in_one_publication[lost-merged]",
        "publication/commit/test_concurrent_publishers.py::test_1_a_lost_reply_at_any_step_ends_in_one_publication[refused-rebased]",
        "publication/rebase/test_other_writers.py::test_where_the_rows_cannot_be_proved_the_same_it_is_refused[DELETE FROM {t} WHERE id = 1]",
        "publication/rebase/test_rebase.py::test_upserts_without_partitions_meet_by_the_bounds_of_their_keys[Spark]",
        "publication/rebase/test_replaced_partitions.py::test_a_week_replaced_with_no_rows_is_replaced[False-arrow]",
        "publication/rebase/test_replaced_partitions.py::test_a_week_replaced_with_no_rows_is_replaced[True-spark]",
        "publication/rebase/test_replaced_partitions.py::test_one_week_written_twice_is_published_once[base0-arrow]",
        "publication/rebase/test_replaced_partitions.py::test_one_week_written_twice_is_published_once[base1-spark]",
        "publication/rebase/test_replaced_partitions.py::test_other_weeks_are_replayed_and_keep_their_record[arrow]",
        "publication/rebase/test_row_deletes.py::test_what_main_deleted_does_not_come_back[deletion]",
        "publication/rebase/test_row_deletes.py::test_what_main_deleted_does_not_come_back[upsert]",
        "publication/reconcile/test_pass.py::test_nine_waiting_runs_share_their_checks[1000-9]",
        "publication/reconcile/test_pass.py::test_what_does_not_fit_waits_for_the_next_tick_and_the_oldest_comes_first[real]",
        "publication/runtime/test_sql_reads.py::test_write_skew_of_runs_that_read_by_themselves_is_refused[table]",
        "remote/test_remote.py::test_the_graph_is_published_on_the_whole_stack",
        "sda/alerts/test_subscribers.py::test_whoever_ends_the_process_loses_nothing[2-0]",
        "sda/test_other_writers.py::test_whoever_writes_the_list_is_that_of_the_catalogue",
        "sda/test_registry_lake.py::test_ten_writers_at_once_publish_what_one_after_the_other_would",
        "sda/test_screening_agreement.py::test_simulated_objects_have_the_events_of_brute_force[2]",
        "suite/test_rename_names.py::test_nothing_is_written_when_a_name_is_taken_or_unknown[amount-counted]",
        "suite/test_rename_names.py::test_nothing_is_written_when_a_name_is_taken_or_unknown[amount.found-there]",
        "suite/test_rename_names.py::test_nothing_is_written_when_a_name_is_taken_or_unknown[amount.inner(one)-found]",
        "testing/test_conflicts_page.py::test_both_add_a_column_of_one_name[seven]",
        "ui/test_ui.py::test_a_blocked_launch_is_red_and_says_why",
        "ui/test_ui.py::test_a_launch_ends_in_a_publication_that_can_be_read",
    }
)
"""More tests, or single cases of tests, that only `make test-soak` runs, to keep `make test` short."""


def soaking() -> bool:
    """Whether this session also runs the soak tests."""
    return bool(os.environ.get(VARIABLE))


def is_left_out(marks: Sequence[str], *, expression: str, soaking: bool) -> bool:
    """Whether a test with these marks is deselected.

    `expression` is the value of `-m`. If it names the marker, pytest decides.
    """
    return MARKER in marks and not soaking and MARKER not in expression


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove soak tests from `items` and report them to pytest as deselected, unless this session runs them."""
    config.stash[COLLECTED] = frozenset(item.nodeid.removeprefix(FOLDER) for item in items)
    expression, everything = str(config.option.markexpr), soaking()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        name = item.nodeid.removeprefix(FOLDER)
        if not SLOW.isdisjoint({name, name.partition("[")[0]}):
            item.add_marker(MARKER)
        marks = [mark.name for mark in item.iter_markers()]
        (left_out if is_left_out(marks, expression=expression, soaking=everything) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
