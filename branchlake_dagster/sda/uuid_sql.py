"""Build Spark SQL expressions of name-based UUIDs, for which Spark has no function."""

from __future__ import annotations

from uuid import UUID


def uuid5_sql(namespace: UUID, name_sql: str) -> str:
    """Return the SQL expression of the version 5 UUID (RFC 9562) of a text in a namespace.

    Args:
        namespace: The namespace. If it changes, all UUIDs change.
        name_sql: SQL of the text.
    """
    # `transform` names the digest, so that it is computed once.
    digest = uuid5_digest_sql(namespace, name_sql)
    return f"transform(array({digest}), digest -> {uuid5_from_digest_sql('digest')})[0]"


def uuid5_digest_sql(namespace: UUID, name_sql: str) -> str:
    """Return the SQL expression of the SHA-1 digest (hexadecimal) from which a version 5 UUID is built."""
    return f"sha1(concat(unhex('{namespace.hex}'), encode({name_sql}, 'UTF-8')))"


def uuid5_from_digest_sql(digest: str) -> str:
    """Return the SQL expression of a version 5 UUID. `digest` is the column with its SHA-1 digest."""
    # The two highest bits of this digit are the variant, 10.
    variant = f"translate(substr({digest}, 17, 1), '0123456789abcdef', '89ab89ab89ab89ab')"
    return (
        f"concat(substr({digest}, 1, 8), '-', substr({digest}, 9, 4), '-5', substr({digest}, 14, 3), '-',"
        f" {variant}, substr({digest}, 18, 3), '-', substr({digest}, 21, 12))"
    )
