"""The estimate of the bytes that Spark sends to a worker at once, from the sizes of landing files."""

from __future__ import annotations

import random

import pytest

from branchlake_dagster.ingest.record_frames import MAX_ARROW_RECORDS, estimate_most_bytes


def test_no_files_have_no_bytes() -> None:
    assert estimate_most_bytes([]) == 0
    assert estimate_most_bytes([(0, 900)]) == 900


def test_a_file_of_unknown_size_makes_the_size_unknown() -> None:
    assert estimate_most_bytes([(10, 900), (10, None)]) is None


def test_many_files_of_small_records_are_small() -> None:
    assert estimate_most_bytes([(10_000, 1 << 20)] * 1_000) == 2 << 20


@pytest.mark.parametrize("seed", range(20))
def test_no_successive_records_are_larger(seed: int) -> None:
    """Within a file only its whole size is known, so the records of a part can have all of its bytes."""
    chance = random.Random(seed)
    files = [
        (rows, rows * chance.randrange(1, 1_000))
        for rows in (chance.choice((1, 7, 400, 2_499, 2_500, 9_000)) for _ in range(40))
    ]
    most_bytes = estimate_most_bytes(files)
    for _ in range(5):
        chance.shuffle(files)
        for first in range(len(files)):
            # The last record of a file, whole files, and the first record of another one.
            rows, size = 1, files[first][1]
            for count, file_bytes in files[first + 1 :]:
                size += file_bytes
                rows += count
                if rows >= MAX_ARROW_RECORDS:
                    break
            assert size <= most_bytes, (seed, first)
