from collections.abc import Iterator

import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.sda.alerts.alert_log import AlertLog, alert_log


@pytest.fixture
def log(lakehouse: Lakehouse) -> Iterator[AlertLog]:
    """The pipeline's log of alerts, empty."""
    with alert_log(lakehouse) as one:
        yield one
