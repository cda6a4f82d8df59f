"""Helpers to declare the columns of contracts, with meaning, unit and checks."""

# No `from __future__ import annotations`: pandera reads the annotations.
from typing import TYPE_CHECKING, Any, Literal, get_args

import pandera.pyspark as pa

from branchlake_dagster.sda.gp.rules import MAX_SAT_NO

if TYPE_CHECKING:
    Contract = pa.DataFrameModel[Any]
else:
    # Generic to type checkers only: at run time pandera refuses the parameter.
    Contract = pa.DataFrameModel

UUID5_PATTERN = "^[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"

DataMode = Literal["REAL", "SIMULATED", "TEST", "EXERCISE"]
DATA_MODES = [*get_args(DataMode)]


def required_column(description: str, unit: str | None = None, **promises: Any) -> Any:
    """Return a column without nulls. `promises` are pandera's checks on its values."""
    return optional_column(description, unit, nullable=False, **promises)


def optional_column(
    description: str, unit: str | None = None, *, nullable: bool = True, **promises: Any
) -> Any:
    """Return a column that may have nulls. `promises` are pandera's checks on its values."""
    metadata = {"unit": unit} if unit else None
    return pa.Field(nullable=nullable, description=description, metadata=metadata, **promises)


def catalogue_number(whose: str = "the object", *, nullable: bool = False) -> Any:
    """Return a column with an object's number in the satellite catalog (NORAD_CAT_ID)."""
    return optional_column(
        f"Satellite catalog number of {whose} (NORAD_CAT_ID).", nullable=nullable, ge=1, le=MAX_SAT_NO
    )


def window_column() -> Any:
    """Return the column of the hour that a row belongs to."""
    return required_column("Start of the hourly window, UTC.")
