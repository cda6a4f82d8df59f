"""Row contracts of the graph's tables, as pandera PySpark models.

Limits are physics or the format's own, never what happened to be in the sample: a broken rule means that
a row cannot be true. Every column of a table is here in the table's order, with its meaning and unit; those
without a limit add nothing but their name and type to what is promised.

Names and units are those of the Orbit Data Messages (CCSDS 502.0-B-3: OMM for elements, OPM for state and
covariance), the Conjunction Data Message (CCSDS 508.0-B-1) and the Unified Data Library's observation
services, in snake case. Where ours differ from the source, the unit is in the column's name.
"""

from branchlake_dagster.sda.contracts.catalogue import (
    CatalogueEntry,
    ElementSet,
    MergeOutcome,
    RegisteredObject,
    RejectedRecord,
    Satellite,
    SatelliteEntry,
)
from branchlake_dagster.sda.contracts.conjunctions import Conjunction, ConjunctionAlert, ConjunctionRisk
from branchlake_dagster.sda.contracts.ephemerides import EphemerisConjunction
from branchlake_dagster.sda.contracts.observations import Association, Observation, RejectedObservation
from branchlake_dagster.sda.contracts.raw import RawLink, RawOptical, RawRadar
from branchlake_dagster.sda.contracts.reports import HourReport
from branchlake_dagster.sda.contracts.states import QuarantinedObject
from branchlake_dagster.sda.contracts.trust import ElementError, ElementJump, ObjectError

__all__ = [
    "Association",
    "CatalogueEntry",
    "Conjunction",
    "ConjunctionAlert",
    "ConjunctionRisk",
    "ElementError",
    "ElementJump",
    "ElementSet",
    "EphemerisConjunction",
    "HourReport",
    "MergeOutcome",
    "ObjectError",
    "Observation",
    "QuarantinedObject",
    "RawLink",
    "RawOptical",
    "RawRadar",
    "RegisteredObject",
    "RejectedObservation",
    "RejectedRecord",
    "Satellite",
    "SatelliteEntry",
]
