"""Which run a branch belongs to, asked of a Dagster instance without a lake."""

import uuid
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster.internals.dagster import ASSET_RESUME_RETRY_TAG, PARENT_RUN_ID_TAG
from branchlake_dagster.runs.branch_owner import (
    is_retry,
    load_branch_owner,
    load_branch_owners,
    load_runs_on_branch,
)
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunLocation, build_opening_tags
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.dagster_internals import create_run_for_test
from branchlake_dagster_tests.suite.instances import new_instance

FAILED, RUNNING, SUCCESS = (
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.SUCCESS,
)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with new_instance() as found:
        yield found


def launch(
    instance: dg.DagsterInstance,
    status: dg.DagsterRunStatus = RUNNING,
    *,
    parent: dg.DagsterRun | None = None,
    steps: list[str] | None = None,
    opens: str | None = None,
    continues: str | None = None,
    **tags: str,
) -> dg.DagsterRun:
    """A run; with a parent it inherits all of its tags, as the UI and the retry daemon do."""
    run_id = str(uuid.uuid4())
    more: dict[str, Any] = {}
    if parent is not None:
        tags = {**parent.tags, PARENT_RUN_ID_TAG: parent.run_id, **tags}
        more = {"parent_run_id": parent.run_id, "root_run_id": parent.root_run_id or parent.run_id}
    if opens is not None:
        tags |= build_opening_tags(
            run_id, RunLocation(opens or run_branch_name(run_id), "0" * 64, continues), tags
        )
    return create_run_for_test(
        instance, run_id=run_id, status=status, tags=tags, step_keys_to_execute=steps, **more
    )


def test_a_branch_belongs_to_the_run_in_its_name(instance: dg.DagsterInstance) -> None:
    run = launch(instance, opens="")
    branch = run_branch_name(run.run_id)
    assert load_branch_owners(instance, [branch, "run-unknown"]).keys() == {branch, "run-unknown"}
    assert load_branch_owners(instance, ["run-unknown"]) == {"run-unknown": None}
    found = load_branch_owner(instance, branch)
    assert found is not None
    assert found.run_id == run.run_id
    assert load_branch_owners(instance, []) == {}


def test_a_retry_claims_its_parents_branch_before_it_touched_it(instance: dg.DagsterInstance) -> None:
    parent = launch(instance, FAILED, opens="")
    branch = run_branch_name(parent.run_id)
    retry = launch(instance, parent=parent, steps=["b"])
    assert load_branch_owner(instance, branch).run_id == retry.run_id
    again = launch(instance, parent=retry, steps=["b"])
    assert load_branch_owner(instance, branch).run_id == again.run_id
    assert [run.run_id for run in load_runs_on_branch(instance, branch)] == [
        parent.run_id,
        retry.run_id,
        again.run_id,
    ]


def test_the_work_of_a_run_includes_what_it_took_over(instance: dg.DagsterInstance) -> None:
    parent = launch(instance, FAILED, opens="")
    first = launch(
        instance, FAILED, parent=parent, steps=["b"], opens="", continues=run_branch_name(parent.run_id)
    )
    second = launch(
        instance, FAILED, parent=first, steps=["b"], opens="", continues=run_branch_name(first.run_id)
    )
    third = launch(instance, parent=second, steps=["b"])
    ids = [parent.run_id, first.run_id, second.run_id, third.run_id]
    assert [run.run_id for run in load_runs_on_branch(instance, run_branch_name(second.run_id))] == ids
    assert load_branch_owner(instance, run_branch_name(first.run_id)).run_id == first.run_id


def test_a_retry_whose_tags_were_not_copied_claims_too(instance: dg.DagsterInstance) -> None:
    parent = launch(instance, FAILED, opens="")
    retry = create_run_for_test(
        instance,
        parent_run_id=parent.run_id,
        root_run_id=parent.run_id,
        step_keys_to_execute=["b"],
        tags={PARENT_RUN_ID_TAG: parent.run_id},
    )
    assert load_branch_owner(instance, run_branch_name(parent.run_id)).run_id == retry.run_id


def test_a_retry_of_single_assets_is_one(instance: dg.DagsterInstance) -> None:
    parent = launch(instance, FAILED, opens="")
    retry = launch(instance, parent=parent, **{ASSET_RESUME_RETRY_TAG: "true"})
    assert is_retry(instance, retry)
    assert load_branch_owner(instance, run_branch_name(parent.run_id)).run_id == retry.run_id


def test_a_full_re_execution_does_not_claim_with_inherited_tags(instance: dg.DagsterInstance) -> None:
    parent = launch(instance, FAILED, opens="")
    whole = launch(instance, parent=parent)
    assert whole.tags[RunTag.OPENED_BY] == parent.run_id
    assert not is_retry(instance, whole)
    assert load_branch_owner(instance, run_branch_name(parent.run_id)).run_id == parent.run_id
    assert load_branch_owner(instance, run_branch_name(whole.run_id)).run_id == whole.run_id


def test_a_run_at_work_comes_before_newer_ones_that_ended(instance: dg.DagsterInstance) -> None:
    parent = launch(instance, FAILED, opens="")
    branch = run_branch_name(parent.run_id)
    works = launch(instance, parent=parent, steps=["b"])
    launch(instance, FAILED, parent=parent, steps=["b"])
    assert load_branch_owner(instance, branch).run_id == works.run_id


def test_a_retry_that_failed_before_it_touched_the_lake_changes_nothing(
    instance: dg.DagsterInstance,
) -> None:
    parent = launch(instance, SUCCESS, opens="")
    branch = run_branch_name(parent.run_id)
    launch(instance, FAILED, parent=parent, steps=["b"])
    assert load_branch_owner(instance, branch).run_id == parent.run_id
    # One that succeeded without touching it made the whole a success.
    good = launch(instance, SUCCESS, parent=parent, steps=["b"])
    assert load_branch_owner(instance, branch).run_id == good.run_id


def test_a_retry_of_a_run_without_tables_has_a_branch_of_its_own(instance: dg.DagsterInstance) -> None:
    parent = launch(instance, FAILED)
    retry = launch(instance, parent=parent, steps=["b"], opens="")
    assert load_branch_owner(instance, run_branch_name(retry.run_id)).run_id == retry.run_id
    assert [run.run_id for run in load_runs_on_branch(instance, run_branch_name(retry.run_id))] == [
        retry.run_id
    ]
