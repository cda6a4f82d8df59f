"""Contracts that depend on the kinds of sensor that a code location uses."""

# No `from __future__ import annotations`: pandera reads the annotations.
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation

from branchlake_dagster.sda.contracts.fields import Contract, optional_column, required_column
from branchlake_dagster.sda.contracts.observations import Association, Observation, RejectedObservation
from branchlake_dagster.sda.contracts.states import TrackFit, TrackState

_TITLES = {"radar": "Radar", "optical": "Optical", "isl": "Inter-satellite link"}


def observation_contract(source_kinds: Sequence[str]) -> type[Contract]:
    """Return the contract of observations, with these kinds as the allowed values of `source_kind`."""
    return _restrict_kinds(Observation, source_kinds)


def rejected_observation_contract(source_kinds: Sequence[str]) -> type[Contract]:
    """Return the contract of rejected measurements, with these kinds as the allowed `source_kind`."""
    return _restrict_kinds(RejectedObservation, source_kinds)


def association_contract(source_kinds: Sequence[str]) -> type[Contract]:
    """Return the contract of associations, with these kinds as the allowed `source_kind`."""
    return _restrict_kinds(Association, source_kinds)


def fused_track_contract(source_kinds: Sequence[str]) -> type[Contract]:
    """Return the contract of tracks: the state, a column `n_<kind>` for each kind, and columns of the fit."""
    counts = {
        f"n_{kind}": optional_column(f"{_TITLES.get(kind, kind)} observations that were used.")
        for kind in source_kinds
    }
    middle = _build_contract("TrackCounts", "Numbers of observations.", (Contract,), T.LongType, counts)
    # The columns of the last base class come first.
    bases = (TrackFit, middle, TrackState)
    return _build_contract("FusedTrack", "An estimated state with its formal covariance.", bases)


def _restrict_kinds(contract: type[Contract], source_kinds: Sequence[str]) -> type[Contract]:
    column = contract.to_schema().columns["source_kind"]
    field = required_column(column.description or "", isin=list(source_kinds))
    name, text = contract.__name__, contract.__doc__ or ""
    return _build_contract(name, text, (contract,), T.StringType, {"source_kind": field})


def _build_contract(
    name: str,
    text: str,
    bases: tuple[type, ...],
    column_type: type[T.DataType] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> type[Contract]:
    """Return a contract with the columns of `bases`, and with added or replaced columns of one type."""
    own = dict(fields or {})
    body = {
        "__doc__": text,
        "__module__": __name__,
        "__annotations__": dict.fromkeys(own, column_type),
        **own,
    }
    return cast("type[Contract]", type(name, bases, body))
