from datetime import timedelta

import pytest

from branchlake_dagster.branching.reaper import RunState, decide

HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("state", "age", "delete"),
    [
        (RunState.ACTIVE, HOUR, False),
        (RunState.ACTIVE, 7 * HOUR, True),
        (RunState.ACTIVE, None, False),
        (RunState.SETTLED, timedelta(0), True),
        (RunState.SETTLED, None, True),
        (RunState.AWAITING_PUBLICATION, HOUR, False),
        (RunState.AWAITING_PUBLICATION, 7 * HOUR, True),
        (RunState.MISSING, timedelta(minutes=5), False),
        (RunState.MISSING, 2 * HOUR, True),
        (RunState.MISSING, None, False),
    ],
)
def test_seed_000_rules_and_their_guards(state: RunState, age: timedelta | None, delete: bool) -> None:
    found, reason = decide(state, age, max_age=6 * HOUR, orphan_grace=HOUR)
    assert found is delete
    assert reason
