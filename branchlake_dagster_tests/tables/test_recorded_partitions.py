"""The partitions that a snapshot names: nothing that a key may hold changes what is read back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchlake_dagster.tables.recorded_partitions import (
    MAX_LISTED,
    RecordedPartitions,
    format_partitions,
    is_shortened,
    parse_entries,
)


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.text(st.sampled_from('ab,[]"é '), min_size=1), max_size=30, unique=True))
def test_the_first_keys_and_the_number_of_all_are_read_back(keys: list[str]) -> None:
    found = RecordedPartitions.parse(format_partitions(keys))
    assert found.names == tuple(keys[:MAX_LISTED])
    assert found.count == len(keys)
    assert found.is_complete == (len(keys) <= MAX_LISTED)
    assert is_shortened(parse_entries(format_partitions(keys))) == (not found.is_complete)


def test_keys_without_commas_are_recorded_as_before() -> None:
    assert format_partitions(["2026-11-01", "2026-11-02|x"]) == "2026-11-01,2026-11-02|x"
    assert format_partitions([]) == ""


@pytest.mark.parametrize(
    ("record", "names", "count"),
    [
        ("DE,AT", ("DE", "AT"), 2),
        ("a,b,… 30 in all", ("a", "b"), 30),
        ("a,…", ("a",), 2),
        ("[x", ("[x",), 1),
        ("", (), 0),
    ],
)
def test_records_of_older_versions(record: str, names: tuple[str, ...], count: int) -> None:
    assert RecordedPartitions.parse(record) == RecordedPartitions(names, count, may_hold_commas=True)
