"""PyIceberg builds the metrics of a data file at their first use; another thread must not see a part of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyiceberg.utils.lazydict import LazyDict

from branchlake_dagster.internals import pyiceberg as pyiceberg_internals


class WatchedPairs(tuple[int, ...]):
    """Keys and values of a part of a map, which call `when_read` at their first read."""

    when_read: Callable[[], object] | None = None

    def __getitem__(self, index: Any) -> Any:
        when_read, self.when_read = self.when_read, None
        if when_read is not None:
            when_read()
        return super().__getitem__(index)


def test_a_map_that_is_read_while_it_is_built() -> None:
    assert LazyDict._build_dict is pyiceberg_internals._build_whole_dict
    second_part = WatchedPairs((2, 20))
    lazy_dict: LazyDict[int, int] = LazyDict([(1, 10), second_part])
    seen: list[dict[int, int]] = []
    second_part.when_read = lambda: seen.append(dict(lazy_dict.items()))
    assert dict(lazy_dict.items()) == {1: 10, 2: 20}
    assert seen == [{1: 10, 2: 20}]
