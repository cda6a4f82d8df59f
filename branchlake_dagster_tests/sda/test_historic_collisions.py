"""Two collisions between cataloged objects, from the last element sets before them.

The element sets are those of Space-Track's GP history, as quoted by the public repository
Salad109/satellite-conjunction-detector (commit 60c569cc, IridiumCosmosBackTest and CeriseArianBackTest). Several
other repositories quote the same two sets of 9 February 2009, with the element numbers of that time.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from branchlake_dagster.sda.benchmarks.agreement import screen_events
from branchlake_dagster.sda.benchmarks.brute_force import find_events, read_reference_catalog
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.orbits.propagation import Elements

IRIDIUM_33_AND_COSMOS_2251 = """\
1 24946U 97051C   09040.78448243 +.00000153 +00000-0 +47668-4 0  9994
2 24946 086.3994 121.7028 0002288 085.1644 274.9812 14.34219863597336
1 22675U 93036A   09040.49834364 -.00000001  00000-0  95251-5 0  9996
2 22675 074.0355 019.4646 0016027 098.7014 261.5952 14.31135643817415
"""
CERISE_AND_ARIANE_DEBRIS = """\
1 23606U 95033B   96205.39273562 +.00000083 +00000-0 +23247-4 0  9999
2 23606 098.1025 141.7519 0008991 067.4104 292.8048 14.67264268056023
1 18208U 86019RF  96205.34413154 +.00001097 +00000-0 +20371-3 0  9993
2 18208 098.4535 334.7433 0014702 119.3840 240.8797 14.67242450509233
"""


def screen_both_ways(lines: str, start: datetime, hours: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The encounters within 5 km by the product and by brute force, with ``tca``."""
    elements = Elements.from_arrow(
        read_catalogue(lines.encode(), "history").elements.sort("sat_no").to_arrow()
    )
    catalog = read_reference_catalog(lines.encode())
    found = (
        screen_events(elements, start, minutes=60 * hours, threshold_km=5.0),
        find_events(catalog, start, minutes=60 * hours, threshold_km=5.0),
    )
    for events in found:
        assert set(events["kind"]) == {"encounter"}
    product, reference = (
        events.with_columns(tca=pl.lit(start) + pl.duration(microseconds=pl.col("time_s") * 1e6))
        for events in found
    )
    return product, reference


def test_iridium_33_and_cosmos_2251_on_10_february_2009() -> None:
    """Bennett et al. (research-repository.rmit.edu.au, 27381480): by SGP4, 698.72 m at 16:55:59.80.

    CelesTrak's SOCRATES predicted 584 m in its report of 15:02 UTC (celestrak.org/events/collision). It
    does not quote the element sets of that report.
    """
    published = datetime(2009, 2, 10, 16, 55, 59, 800_000, UTC)
    start = datetime(2009, 2, 10, 12, tzinfo=UTC)
    for events in screen_both_ways(IRIDIUM_33_AND_COSMOS_2251, start, 8):
        (event,) = events.rows(named=True)
        assert (event["first"], event["second"]) == (22675, 24946)
        assert abs(event["tca"] - published) < timedelta(milliseconds=10)
        assert event["miss_km"] == pytest.approx(0.69872, abs=0.001)
        assert event["speed_km_s"] == pytest.approx(11.7, abs=0.1)


def test_cerise_and_a_piece_of_ariane_on_24_july_1996() -> None:
    """Alby, Lansard and Michal (ESA SP-393, 1997): six approaches, the collision at the last.

    The times and the relative speed are those of the paper, as quoted by the repository named above. For the
    last approach the paper has 1.5 km from element sets, and 0.687 to 0.917 km after better orbits.
    """
    passes = [
        datetime(1996, 7, 24, 1, 37, 2, 0, UTC),
        datetime(1996, 7, 24, 3, 15, 14, 100_000, UTC),
        datetime(1996, 7, 24, 4, 53, 26, 100_000, UTC),
        datetime(1996, 7, 24, 6, 31, 38, 200_000, UTC),
        datetime(1996, 7, 24, 8, 9, 50, 200_000, UTC),
        datetime(1996, 7, 24, 9, 48, 2, 500_000, UTC),
    ]
    for events in screen_both_ways(CERISE_AND_ARIANE_DEBRIS, datetime(1996, 7, 24, tzinfo=UTC), 10):
        assert events["first"].unique().to_list() == [18208]
        assert events.height == len(passes)
        for tca, published in zip(events["tca"].to_list(), passes, strict=True):
            assert abs(tca - published) < timedelta(milliseconds=300)
        assert events["miss_km"].is_sorted(descending=True)
        assert 0.687 <= events["miss_km"][-1] <= 0.917
        assert events["speed_km_s"].to_list() == pytest.approx([14.769] * len(passes), abs=0.001)


@pytest.mark.parametrize("lines", [IRIDIUM_33_AND_COSMOS_2251, CERISE_AND_ARIANE_DEBRIS])
def test_the_quoted_element_sets_are_whole(lines: str) -> None:
    parsed = read_catalogue(lines.encode(), "history")
    assert parsed.rejected.is_empty()
    assert parsed.elements.height == 2
