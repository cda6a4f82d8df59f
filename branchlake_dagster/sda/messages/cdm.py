"""Write Conjunction Data Messages (CCSDS 508.0-B-1): each reports one close approach of two objects.

The approaches were computed from element sets. A message contains only known facts. Element sets have no
covariance. Instead, the message has the errors that element sets of the same age usually had in comparison
with later sets. So COVARIANCE_METHOD is DEFAULT, not CALCULATED, and a comment names the error model. The
errors are three standard deviations of position. The standard requires all 21 terms of the covariance, and
readers must ignore a row and column whose diagonal term is zero (5.2.8). The terms of the velocity are zero,
and all terms of an object whose error is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from branchlake_dagster.sda.messages.errors import NotAMessage
from branchlake_dagster.sda.messages.notation import (
    Block,
    Item,
    Notation,
    as_kvn,
    as_xml,
    comment_items,
    format_text,
    format_utc,
    identifier_item,
    number_item,
    time_item,
)

VERSION = Item("CCSDS_CDM_VERS", "1.0")
METHOD = "FOSTER-1992"
"""The name of the computed probability integral (`trust.probability`) in the SANA registry."""
_TERMS = ("R", "T", "N", "RDOT", "TDOT", "NDOT")
_COSPAR = re.compile(r"\d{4}-\d{3}[A-Z]{1,3}")
_TYPES = {
    **dict.fromkeys(("PAYLOAD", "PAY"), "PAYLOAD"),
    **dict.fromkeys(("ROCKET BODY", "R/B"), "ROCKET BODY"),
    **dict.fromkeys(("DEBRIS", "DEB"), "DEBRIS"),
    **dict.fromkeys(("UNKNOWN", "UNK", "TBA"), "UNKNOWN"),
}
_MESSAGE_FIELDS = (
    "event_id",
    "tca",
    "screened_from",
    "screened_until",
    "threshold_km",
    "error_model_id",
    "hard_body_radius_m",
)
_OBJECT_PREFIXES = ("sat1_", "sat2_", "relative_")


@dataclass(frozen=True)
class Party:
    """One object of a close approach.

    ``number`` is its catalog number and ``cospar`` its international designator. ``position`` (km) and
    ``velocity`` (km/s) are in GCRF (an inertial frame) at the time of closest approach.
    """

    number: int
    name: str | None
    cospar: str | None
    kind: str | None
    element_epoch: datetime
    source: str | None
    data_mode: str | None
    position: Sequence[float]
    velocity: Sequence[float]


def message_id(row: Mapping[str, Any]) -> str:
    """Return the id of a row's message: the event's id, and a hash of the values that the message states.

    The same event in a list with other values gets another id.
    """
    field_names = sorted(name for name in row if name in _MESSAGE_FIELDS or name.startswith(_OBJECT_PREFIXES))
    content = "\n".join(f"{name}={_plain(row[name])}" for name in field_names)
    return f"{row['event_id']}_{sha256(content.encode()).hexdigest()[:12]}".upper()


def _plain(value: Any) -> str:
    return str(value.astimezone(UTC)) if isinstance(value, datetime) else repr(value)


def check_kind(row: Mapping[str, Any]) -> None:
    """Raise NotAMessage for a row that is not an encounter, because it has no definite closest approach."""
    if row["kind"] != "encounter":
        raise NotAMessage(
            f"{row['event_id']} is of kind {row['kind']}: it has no time of closest approach of its own, "
            "which a message is of.",
            hint="Ask for --kind encounter.",
            reason="no_closest_approach",
        )


def format_cdm(
    row: Mapping[str, Any],
    parties: tuple[Party, Party],
    *,
    originator: str,
    created: datetime,
    notation: Notation,
) -> str:
    """Return the message about one row of the published list.

    Args:
        row: A row of ``sda.conjunctions``.
        parties: Its two objects, in the row's order.
        originator: The author of the message; letters, digits, underscores and dashes.
        created: The creation time, with a time zone.
        notation: KVN or XML.

    Raises:
        NotAMessage: The row is not an encounter, or a value cannot be written.
    """
    check_kind(row)
    body = Block("body", (_relative(row), *(_segment(row, k, one) for k, one in enumerate(parties, 1))))
    message = Block("cdm", (_header(row, parties, originator, created), body))
    return (as_kvn if notation is Notation.KVN else as_xml)(VERSION, message)


def _header(
    row: Mapping[str, Any], parties: tuple[Party, Party], originator: str, created: datetime
) -> Block:
    notes = [
        "States are of SGP4 from published element sets, brought from TEME to GCRF.",
        f"Event {format_text(str(row['event_id']))}, first reported in the screening from "
        f"{format_utc(row['first_reported'])}.",
    ]
    if modes := sorted({format_text(one.data_mode) for one in parties} - {"REAL"}):
        notes.append(f"NOT REAL: data mode of the element sets is {' and '.join(modes)}.")
    return Block(
        "header",
        (
            *comment_items(*notes),
            time_item("CREATION_DATE", created),
            identifier_item("ORIGINATOR", originator),
            identifier_item("MESSAGE_ID", message_id(row)),
        ),
    )


def _relative(row: Mapping[str, Any]) -> Block:
    notes = [f"Screened was for a distance of {row['threshold_km']:g} km."]
    chance: tuple[Item, ...] = ()
    if row.get("collision_probability") is not None:
        notes += [
            f"Probability: both objects together are a sphere of "
            f"{row['hard_body_radius_m']:g} m radius{_radii(row)}.",
            f"It is computed from default covariances; the largest of any scale of them is "
            f"{row['max_collision_probability']:.3E}.",
        ]
        if row.get("probability_diluted"):
            notes.append("It is diluted: smaller covariances would raise it.")
        chance = (
            number_item("COLLISION_PROBABILITY", row["collision_probability"], shape=".6E"),
            Item("COLLISION_PROBABILITY_METHOD", METHOD),
        )
    elif because := row.get("no_probability_because"):
        notes.append(f"No probability: {because}.")
    state = Block(
        "relativeStateVector",
        tuple(
            number_item(
                f"RELATIVE_{name}_{axis.upper()}", row[f"relative_{column}_{axis}_{unit}"] * 1e3, si, shape
            )
            for name, column, unit, si, shape in (
                ("POSITION", "position", "km", "m", ".3f"),
                ("VELOCITY", "velocity", "km_s", "m/s", ".6f"),
            )
            for axis in "rtn"
        ),
    )
    return Block(
        "relativeMetadataData",
        (
            *comment_items(*notes),
            time_item("TCA", row["tca"]),
            number_item("MISS_DISTANCE", row["miss_distance_km"] * 1e3, "m", ".3f"),
            number_item("RELATIVE_SPEED", row["relative_speed_km_s"] * 1e3, "m/s", ".6f"),
            state,
            time_item("START_SCREEN_PERIOD", row["screened_from"]),
            time_item("STOP_SCREEN_PERIOD", row["screened_until"]),
            *chance,
        ),
    )


def _radii(row: Mapping[str, Any]) -> str:
    """Format the sources of the radius. Rows of older lists do not have them."""
    if row.get("sat1_radius_source") is None or row.get("sat2_radius_source") is None:
        return ", assumed"
    each = (f"{row[f'sat{k}_radius_m']:g} m by {row[f'sat{k}_radius_source']}" for k in (1, 2))
    return f": {' and '.join(each)}"


def _segment(row: Mapping[str, Any], which: int, party: Party) -> Block:
    cospar = (party.cospar or "").strip().upper()
    kind = _TYPES.get((party.kind or "").strip().upper())
    issued = f" issued by {format_text(party.source)}" if party.source else ""
    metadata = Block(
        "metadata",
        (
            *comment_items(
                f"Element set of {party.element_epoch:%Y-%m-%dT%H:%M:%S.%f}{issued}, propagated by SGP4."
            ),
            Item("OBJECT", f"OBJECT{which}"),
            identifier_item("OBJECT_DESIGNATOR", str(party.number)),
            Item("CATALOG_NAME", "SATCAT"),
            Item("OBJECT_NAME", format_text(party.name)),
            identifier_item("INTERNATIONAL_DESIGNATOR", cospar if _COSPAR.fullmatch(cospar) else "UNKNOWN"),
            *((Item("OBJECT_TYPE", kind),) if kind else ()),
            Item("EPHEMERIS_NAME", "NONE"),
            Item("COVARIANCE_METHOD", "DEFAULT"),
            Item("MANEUVERABLE", "N/A"),
            Item("ORBIT_CENTER", "EARTH"),
            Item("REF_FRAME", "GCRF"),
        ),
    )
    vector = Block(
        "stateVector",
        tuple(
            number_item(f"{axis}{dot}", value, unit)
            for dot, values, unit in (("", party.position, "km"), ("_DOT", party.velocity, "km/s"))
            for axis, value in zip("XYZ", values, strict=True)
        ),
    )
    sigmas = [row.get(f"sat{which}_sigma_{axis}_km") for axis in "rtn"]
    return Block("segment", (metadata, Block("data", (vector, _covariance(row, sigmas)))))


def _covariance(row: Mapping[str, Any], sigmas: Sequence[float | None]) -> Block:
    known = [one for one in sigmas if one is not None]
    if len(known) == len(sigmas):
        notes = [
            "Of no orbit determination. Variances of position: from differences of element sets of that age,",
            f"error model {format_text(row['error_model_id'])}. Correlations are not known and given as 0.",
            "Velocity is not known: its terms are 0, to be discounted by 508.0-B-1, 5.2.8.",
        ]
        variances = [(one * 1e3) ** 2 for one in known] + [0.0] * 3
    else:
        notes = ["The covariance is not known: all terms are 0, to be discounted by 508.0-B-1, 5.2.8."]
        variances = [0.0] * 6
    items = []
    for i, one in enumerate(_TERMS):
        for j, other in enumerate(_TERMS[: i + 1]):
            dots = (i >= 3) + (j >= 3)
            unit = ("m**2", "m**2/s", "m**2/s**2")[dots]
            items.append(number_item(f"C{one}_{other}", variances[i] if i == j else 0.0, unit, ".9E"))
    return Block("covarianceMatrix", (*comment_items(*notes), *items))
