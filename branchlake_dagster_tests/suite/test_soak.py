"""Which tests only `make test-soak` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchlake_dagster_tests.suite.soak import COLLECTED, SLOW, is_left_out


@pytest.mark.parametrize(
    ("marks", "expression", "soaking", "left_out"),
    [
        (["spark"], "", False, False),
        (["spark", "soak"], "", False, True),
        (["spark", "soak"], "spark", False, True),
        (["spark", "soak"], "soak and spark", False, False),
        (["spark", "soak"], "", True, False),
    ],
)
def test_a_marked_test_is_left_out_unless_it_is_asked_for(
    marks: list[str], expression: str, soaking: bool, left_out: bool
) -> None:
    assert is_left_out(marks, expression=expression, soaking=soaking) is left_out


@pytest.mark.parametrize("test", sorted(SLOW))
def test_each_slow_test_exists(test: str) -> None:
    module, _, function = test.partition("[")[0].partition("::")
    assert f"def {function}(" in (Path(__file__).parents[1] / module).read_text()


def test_each_case_that_is_left_out_exists(pytestconfig: pytest.Config) -> None:
    if any("::" in argument for argument in pytestconfig.args):
        pytest.skip("single tests were asked for")
    collected = pytestconfig.stash[COLLECTED]
    files = {one.partition("::")[0] for one in collected}
    cases = {one for one in SLOW if "[" in one and one.partition("::")[0] in files}
    assert cases <= collected
