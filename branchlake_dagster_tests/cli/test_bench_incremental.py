"""The folder that the incremental benchmark gives its Spark server."""

from __future__ import annotations

from pathlib import Path

from branchlake_dagster.bench.change_capture import write_spark_conf


def test_spark_logs_its_events_and_no_tokens(tmp_path: Path) -> None:
    folder = write_spark_conf(tmp_path)
    defaults = (folder / "spark-defaults.conf").read_text()
    assert f"spark.eventLog.dir {(tmp_path / 'events').as_uri()}" in defaults
    assert (tmp_path / "events").is_dir()
    assert "Bearer ***" in (folder / "log4j2.properties").read_text()
