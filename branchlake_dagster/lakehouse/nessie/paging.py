"""Walking through Nessie's paged listings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Page(Generic[T]):
    """One answer of a listing: its JSON, for the token and the hash it was read at, and its items."""

    data: Mapping[str, Any]
    items: Sequence[T]


def pages(
    fetch: Callable[[str, Mapping[str, str]], Page[T]], path: Callable[[Mapping[str, Any] | None], str]
) -> Iterator[Page[T]]:
    """All pages, fetched as they are consumed.

    `path(None)` addresses the first page, `path(page)` the one after `page`: a listing of a branch goes on
    at the hash of its first page, else commits made between two pages would mix two states.
    """
    page = fetch(path(None), {})
    while True:
        yield page
        token = page.data.get("token")
        if not page.data.get("hasMore") or not token:
            return
        page = fetch(path(page.data), {"page-token": token})


def items(pages: Iterable[Page[T]]) -> Iterator[T]:
    """The items of the pages, one after the other."""
    return (item for page in pages for item in page.items)


def first(values: Iterable[T], limit: int | None) -> Iterator[T]:
    """At most `limit` values; all of them for None."""
    return iter(values) if limit is None else islice(values, limit)
