"""Commands in the errors of state folders can be copied to a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from branchlake_dagster.embedded.state_folder import (
    LakeMoved,
    build_not_running,
    record_location,
    require_location,
)
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster_tests.suite.raised import raising


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_path_with_spaces_is_one_word_of_a_command(tmp_path: Path, is_copy: bool) -> None:
    old, new = tmp_path / "the lake", tmp_path / "lake's copy"
    (old / "nessie").mkdir(parents=True)
    assert f"BRANCHLAKE_STATE_DIR={old}" in shlex.split(str(build_not_running(old)))
    record_location(old)
    record = (old / "lake.json").read_bytes()
    new.mkdir()
    (new / "lake.json").write_bytes(record)
    if not is_copy:
        old.rename(tmp_path / "gone")
    with pytest.raises(LakeMoved) as raised:
        require_location(new, tables_elsewhere=False)
    assert raised.value.hint is not None
    words = shlex.split(raised.value.hint)
    assert f"BRANCHLAKE_STATE_DIR={old}" in words
    assert is_copy or words[words.index("ln") :][:4] == ["ln", "-s", str(new), f"{old};"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"state_dir": 3}', b"\xff"])
def test_a_record_that_cannot_be_read_is_not_taken_for_an_original(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lake.json"
    path.write_bytes(content)
    for read in (
        lambda: require_location(tmp_path, tables_elsewhere=True),
        lambda: record_location(tmp_path),
    ):
        with raising(ConfigurationError, str(path), reason="location_unreadable", subject=str(path)):
            read()
    assert path.read_bytes() == content
    path.unlink()
    record_location(tmp_path)
    require_location(tmp_path, tables_elsewhere=False)
