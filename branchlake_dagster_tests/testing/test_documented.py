"""docs/testing.md, run as its reader runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import branchlake_dagster as root
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.testing import ThrowawayLake
from branchlake_dagster_tests.testing.documented import files, load_file

ROOT = Path(root.__file__).parents[1]


def test_the_example_passes_and_leaves_nothing(tmp_path: Path, lakehouse: Lakehouse) -> None:
    project, temporary = tmp_path / "project", tmp_path / "tmp"
    project.mkdir()
    temporary.mkdir()
    for name, text in files().items():
        (project / name).write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(temporary),
        # A project that has fetched its jars, and somebody's lake, which a test must not find.
        "BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir),
        "BRANCHLAKE_NESSIE_URI": "http://127.0.0.1:9/api/v2",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    assert not [one for one in temporary.iterdir() if one.name.startswith("branchlake")]
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if any(str(temporary) in argument for argument in process.info["cmdline"] or ())
    ]
    assert left == []
    assert not (project / ".branchlake").exists()


@pytest.mark.spark
class TestContract:
    @pytest.fixture
    def lake_settings(self, lakehouse: Lakehouse) -> Mapping[str, Any]:
        """The session's Spark server, where a project would have its own started."""
        found = lakehouse.endpoints()
        return {"spark_remote": found.spark_remote, "spark_token": found.spark_token}

    def test_a_contract_is_tested_the_same_way(self, lake: ThrowawayLake, tmp_path: Path) -> None:
        load_file("contract.py", tmp_path).test_a_negative_price_blocks(lake)
        assert lake.lakehouse.servers.status()["spark"] is None
