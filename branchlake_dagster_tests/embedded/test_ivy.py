"""Ivy runs of several processes."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from branchlake_dagster.embedded import jars


def test_two_ivys_do_not_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    running, most = 0, 0

    def ivy(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(jars.subprocess, "run", ivy)
    monkeypatch.setattr(jars, "user_java", lambda: Path("java"))

    def one() -> None:
        jars._run_ivy(tmp_path / "ivy.xml", tmp_path / "listing", tmp_path, None)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
