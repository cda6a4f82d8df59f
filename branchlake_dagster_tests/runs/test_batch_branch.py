"""What the name of a batch's branch says, and what it is not taken for."""

from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchlake_dagster.runs.branch_owner import (
    BatchBranch,
    build_batch_branch_name,
    is_own_reference,
    writer_branch,
)
from branchlake_dagster.runs.discarding import discarded_tag_name
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.stored_names import ReferencePrefix

RUN, INSTANCE = "5b1f0b06-95a3-4d0e-8a44-0d3c4a3e9b10", "0c1cf2ab-4f0e-4c39-b7c1-8c2a1e1f7d55"
NOW = datetime(2026, 11, 23, 2, 45, 54, 123_000, UTC)


@given(
    st.uuids(),
    st.uuids(),
    st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 30), timezones=st.just(UTC)),
    st.uuids(version=4),
)
def test_the_name_says_whose_it_is_and_since_when(
    run_id: UUID, instance: UUID, now: datetime, unique: UUID
) -> None:
    name = build_batch_branch_name(str(run_id), str(instance), now=now, random_id=unique)
    assert is_own_reference(name, ReferencePrefix.RUN)
    assert is_own_reference(discarded_tag_name(name), ReferencePrefix.DISCARDED)
    own = UUID(name.removeprefix(ReferencePrefix.RUN).split(".")[0])
    assert (own.version, own.variant, own.fields[-1]) == (7, unique.variant, unique.fields[-1])
    said = [str(one) if one.int else "" for one in (run_id, instance)]
    for reference in (name, discarded_tag_name(name)):
        found = BatchBranch.from_name(reference)
        assert found is not None
        assert [found.run_id, found.instance] == said
        assert abs((found.created_at - now).total_seconds()) <= 0.001
    assert writer_branch(name) == run_branch_name(said[0])


def test_it_says_nothing_of_ids_that_are_no_uuids() -> None:
    name = build_batch_branch_name("nightly", "", now=NOW, random_id=UUID(RUN))
    assert is_own_reference(name)
    assert BatchBranch.from_name(name) == BatchBranch("", "", NOW)


@pytest.mark.parametrize(
    "name",
    [
        "main",
        run_branch_name(RUN),
        f"run-{RUN}.{RUN}.{INSTANCE}",  # version 4 tells no time
        f"run-ffffffff-ffff-7fff-bfff-ffffffffffff.{RUN}.{INSTANCE}",  # the year 10889
        f"run-019ab2c3-0000-7000-8000-000000000000.{RUN}",
        f"run-019ab2c3-0000-7000-8000-000000000000.{RUN}.{INSTANCE}.{RUN}",
        f"run-019ab2c3-0000-7000-8000-000000000000.{RUN}.mine",
    ],
)
def test_other_names_are_no_batches(name: str) -> None:
    assert BatchBranch.from_name(name) is None
    assert writer_branch(name) == name
