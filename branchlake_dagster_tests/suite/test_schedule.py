from __future__ import annotations

from pathlib import Path

import pytest

from branchlake_dagster_tests.suite.schedule import FOLDER, LONGEST, SPREAD, module_of, scope_of

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("module", [*LONGEST, *sorted(SPREAD)])
def test_the_modules_that_are_named_are_there(module: str) -> None:
    assert (TESTS / module).is_file()


def test_a_module_goes_to_one_worker_and_a_long_one_to_several() -> None:
    module, spread = "query/test_names.py", sorted(SPREAD)[0]
    assert module_of(f"{FOLDER}{module}::test_a[x/y::z]") == module
    assert scope_of(f"{FOLDER}{module}::test_a") == scope_of(f"{FOLDER}{module}::test_b") == module
    assert scope_of(f"{FOLDER}{spread}::test_a") != scope_of(f"{FOLDER}{spread}::test_b")


@pytest.mark.parametrize("module", sorted(SPREAD))
def test_what_is_spread_makes_nothing_for_the_module(module: str) -> None:
    assert 'scope="module"' not in (TESTS / module).read_text()
