"""Row contracts of the pipeline's tables, as pandera PySpark models.

Limits come from physics or from the format, never from a sample of data: a row that breaks a rule cannot be
true. The contracts list every column in the table's order, with its meaning and unit. For columns without a
limit, only name and type are checked.

Names and units are those of the Orbit Data Messages (CCSDS 502.0-B-3: OMM for elements, OPM for state and
covariance), the Conjunction Data Message (CCSDS 508.0-B-1) and the Unified Data Library's observation
services, in snake case. If a unit differs from the source, the column's name contains the unit.
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
