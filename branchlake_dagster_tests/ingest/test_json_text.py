"""What the text of a JSON value shows without parsing it."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.ingest.spark_expressions import is_deep_json, is_json_object

pytestmark = pytest.mark.spark

TEXTS: list[tuple[str | None, bool, bool]] = [
    ("{}", True, False),
    (' \r\n\t{"a": 1}', True, False),
    ("[{}]", False, False),
    ('"{"', False, False),
    ("1", False, False),
    ('{"a": ' * 3 + "1" + "}" * 3, True, False),
    ('{"a": ' * 4 + "1" + "}" * 4, True, True),
    ("[" * 4 + "]" * 4, False, True),
    ('{"a": [' * 2 + "]}" * 2, True, True),
    ('{"a": [{}, {}, {}, {}, {}, [[]]]}', True, True),
    ('{"a": [{}, {}, {}, {}, {}, []]}', True, False),
    ('{"[[[[": "{{{{", "b": "\\"[[[["}', True, False),
    ('{"\\\\": [[["]"]]]}', True, True),
    (None, False, False),
]
"""A text, whether it is an object, and whether it has more than three levels."""


def test_objects_and_levels(spark_session: SparkSession) -> None:
    frame = spark_session.createDataFrame(
        [(number, text) for number, (text, _, _) in enumerate(TEXTS)], "n int, text string"
    )
    found = frame.select(
        F.coalesce(is_json_object(F.col("text")), F.lit(False)), is_deep_json(F.col("text"), 3)
    ).orderBy("n")
    assert [tuple(row) for row in found.collect()] == [(is_object, deep) for _, is_object, deep in TEXTS]
