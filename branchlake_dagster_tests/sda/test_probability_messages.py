"""Probabilities of NASA CARA's 53 published messages beside those of CARA's own methods.

The data are those of the repository nasa/CARA_Analysis_Tools (commit a80d0163); they are not part of this one.
"""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest

from branchlake_dagster.sda.trust.assessment import MAX_CROSSING_REVOLUTIONS, MIN_SPEED_KM_S
from branchlake_dagster.sda.trust.differences import rtn_axes
from branchlake_dagster.sda.trust.probability import (
    EncounterPlane,
    build_encounter_plane,
    collision_probability,
    compute_dilution,
)

CARA = Path(__file__).parents[3] / "shared" / "data" / "cara"
MESSAGES = CARA / "test-conjunctions.tar.gz"
RESULTS = CARA / "CARA_PcMethod_Test_Conjunctions.xlsx"

pytestmark = pytest.mark.skipif(
    not (MESSAGES.is_file() and RESULTS.is_file()), reason=f"no messages of NASA CARA in {CARA}"
)

COLUMNS = (
    *("HBR_m", "MissDist_m", "PrimaryPeriodMin", "ViolationsPc2D"),
    *("Pc2D_NoAdj", "Pc2D", "PcSDMC", "PcSDMCLo", "PcSDMCHi"),
)
AGREED = 1e-7
"""Relative tolerance. Measured: 1.9e-8 for both columns."""


class Published(NamedTuple):
    """The 53 conjunctions: states of both objects, combined covariance, and the columns of the spreadsheet.

    ``position`` and ``velocity`` (53, 3) are relative, km and km/s; ``covariance`` is (53, 3, 3), km².
    """

    position: np.ndarray
    velocity: np.ndarray
    covariance: np.ndarray
    columns: dict[str, np.ndarray]

    @property
    def radius_km(self) -> np.ndarray:
        return self.columns["HBR_m"] / 1e3

    @property
    def plane(self) -> EncounterPlane:
        return build_encounter_plane(self.position, self.velocity, self.covariance)


def read_results() -> dict[str, dict[str, float | str]]:
    """The first sheet of the spreadsheet by Conjunction_ID: an xlsx is a zip of XML."""
    tag = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
    with zipfile.ZipFile(RESULTS) as book:
        strings = [
            "".join(text.text or "" for text in one.iter(f"{tag}t"))
            for one in ElementTree.fromstring(book.read("xl/sharedStrings.xml"))
        ]
        sheet = ElementTree.fromstring(book.read("xl/worksheets/sheet1.xml"))
    rows: list[dict[str, float | str]] = []
    for row in sheet.iter(f"{tag}row"):
        cells: dict[str, float | str] = {}
        for cell in row:
            value = cell.findtext(f"{tag}v")
            if value is not None:
                column = re.sub(r"\d", "", cell.attrib["r"])
                cells[column] = strings[int(value)] if cell.get("t") == "s" else float(value)
        rows.append(cells)
    header, *body = rows
    named = [{str(header[key]): value for key, value in row.items() if key in header} for row in body]
    return {str(row["Conjunction_ID"]): row for row in named}


def read_objects(message: str) -> list[dict[str, float]]:
    """The numbers of both objects of a message in KVN, by keyword."""
    sections = re.split(r"^OBJECT\s*=.*$", message, flags=re.MULTILINE)[1:]
    number = re.compile(r"^(\w+)\s*=\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*(?:\[.*\])?\s*$", re.MULTILINE)
    return [{key: float(value) for key, value in number.findall(section)} for section in sections]


def to_state(one: dict[str, float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Position, velocity and the covariance of the position in the message's frame, km, km/s and km²."""
    covariance = np.empty((3, 3))
    for i, row in enumerate("RTN"):
        for j, column in enumerate("RTN"[: i + 1]):
            covariance[i, j] = covariance[j, i] = one[f"C{row}_{column}"] / 1e6
    position = np.array([one[axis] for axis in "XYZ"])
    velocity = np.array([one[f"{axis}_DOT"] for axis in "XYZ"])
    axes = rtn_axes(position[None], velocity[None])[0]
    return position, velocity, axes.T @ covariance @ axes


@pytest.fixture(scope="module")
def published() -> Published:
    results = read_results()
    states, rows = [], []
    with tarfile.open(MESSAGES) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            file = archive.extractfile(member)
            if file is None:
                continue
            first, second = (to_state(one) for one in read_objects(file.read().decode()))
            states.append((second[0] - first[0], second[1] - first[1], first[2] + second[2]))
            rows.append(results[Path(member.name).stem])
    assert len(rows) == len(results) == 53
    columns = {name: np.array([row[name] for row in rows], np.float64) for name in COLUMNS}
    position, velocity, covariance = (np.array(one) for one in zip(*states, strict=True))
    return Published(position, velocity, covariance, columns)


def relative_difference(computed: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(computed / wanted - 1).max())


def test_the_two_dimensional_probability_is_that_of_cara(published: Published) -> None:
    """Down to 4e-168, at the adjusted time of closest approach, to which the plane projects."""
    computed = collision_probability(published.plane, published.radius_km)
    assert relative_difference(computed, published.columns["Pc2D"]) < AGREED
    assert published.columns["Pc2D"].min() < 1e-160


def test_without_adjustment_the_distance_at_the_rounded_time_counts(published: Published) -> None:
    """CARA's column without adjustment takes the distance at the message's time as the miss distance.

    The time is rounded to a millisecond, in which objects move up to 15 m. The plane's own projection is
    another answer, and differs by up to 0.3 percent.
    """
    along = published.velocity / np.linalg.norm(published.velocity, axis=1, keepdims=True)
    in_plane = published.position - np.sum(published.position * along, axis=1, keepdims=True) * along
    distance = np.linalg.norm(published.position, axis=1, keepdims=True)
    lengthened = in_plane / np.linalg.norm(in_plane, axis=1, keepdims=True) * distance
    plane = build_encounter_plane(lengthened, published.velocity, published.covariance)
    wanted = published.columns["Pc2D_NoAdj"]
    assert relative_difference(collision_probability(plane, published.radius_km), wanted) < AGREED
    projected = collision_probability(published.plane, published.radius_km)
    assert 1e-3 < relative_difference(projected, wanted) < 3e-3


def test_states_and_distances_are_read_as_cara_reads_them(published: Published) -> None:
    distance_m = np.linalg.norm(published.position, axis=1) * 1e3
    assert np.abs(distance_m - published.columns["MissDist_m"]).max() < 1e-6


def test_the_method_is_within_the_monte_carlo_interval_where_cara_approves_it(published: Published) -> None:
    """CARA marks 24 messages as fit for the method; 95 of 100 intervals hold the true probability."""
    columns = published.columns
    approved = columns["ViolationsPc2D"] == 0
    computed = collision_probability(published.plane, published.radius_km)
    inside = (columns["PcSDMCLo"] <= computed) & (computed <= columns["PcSDMCHi"])
    assert (np.count_nonzero(approved), np.count_nonzero(inside & approved)) == (24, 22)
    assert relative_difference(computed[approved], columns["PcSDMC"][approved]) < 0.021


def test_which_unfit_messages_the_rule_of_slow_encounters_refuses(published: Published) -> None:
    """The rule of `assess_approaches` refuses 3 of the 29 messages that CARA calls unfit, and none of the others.

    The method assumes a straight line and ignores the errors of the velocities. These are the limits of the
    method, not of the integral, which is CARA's for all 53.
    """
    speed = np.linalg.norm(published.velocity, axis=1)
    along = published.velocity / speed[:, None]
    sigma = np.sqrt(np.einsum("ki,kij,kj->k", along, published.covariance, along))
    revolution_s = published.columns["PrimaryPeriodMin"] * 60
    refused = (speed < MIN_SPEED_KM_S) | (6 * sigma / speed > MAX_CROSSING_REVOLUTIONS * revolution_s)
    unfit = published.columns["ViolationsPc2D"] > 0
    assert np.count_nonzero(unfit) == 29
    assert np.count_nonzero(refused & unfit) == 3
    assert not np.any(refused & ~unfit)


def test_the_maximum_is_no_less_than_the_probability(published: Published) -> None:
    """No column of CARA has the maximum over all scales of the covariance, so only its definition is checked.

    It bounds the two-dimensional probability, not the true one: of ten unfit messages, it is below the interval.
    """
    probability = collision_probability(published.plane, published.radius_km)
    largest = compute_dilution(published.plane, published.radius_km).probability
    assert np.all(largest >= probability * (1 - 1e-9))
    below = largest < published.columns["PcSDMCLo"]
    assert np.count_nonzero(below) == 10
    assert np.all(published.columns["ViolationsPc2D"][below] > 0)
