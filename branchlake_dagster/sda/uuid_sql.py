"""Name-based UUIDs in Spark SQL, which has no function for them."""

from __future__ import annotations

from uuid import UUID


def uuid5_sql(namespace: UUID, name_sql: str) -> str:
    """Return the SQL expression of the version 5 UUID (RFC 9562) of a text in a namespace.

    Args:
        namespace: the namespace. If it changes, all UUIDs change.
        name_sql: SQL of the name, a text.

    """
    digest = f"sha1(concat(unhex('{namespace.hex}'), encode({name_sql}, 'UTF-8')))"
    variant = "lower(hex((cast(conv(substr(d, 17, 1), 16, 10) as int) & 3) | 8))"
    # `transform` names the digest, so that it is computed once.
    return (
        f"transform(array({digest}), d -> concat(substr(d, 1, 8), '-', substr(d, 9, 4), '-5',"
        f" substr(d, 14, 3), '-', {variant}, substr(d, 18, 3), '-', substr(d, 21, 12)))[0]"
    )
