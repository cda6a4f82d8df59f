from __future__ import annotations

import pytest

from branchlake_dagster_tests.suite.absent import absent


@pytest.mark.parametrize(("ci", "outcome"), [("1", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_program_fails_in_ci_alone(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    # The outcome itself would end this test.
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception)) as caught:
        absent("Chromium", hint="Debian: apt-get install chromium")
    assert caught.type is outcome
    assert "apt-get install chromium" in str(caught.value)
    assert str(caught.value).startswith("Chromium ")
