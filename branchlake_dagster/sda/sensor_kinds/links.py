"""The sensor kind of inter-satellite links, which send frames of 88 bytes (`wire.links`).

A link reports position and velocity of its partner, and names it by catalog number: the claim.
"""

from __future__ import annotations

from branchlake_dagster.sda.contracts.raw import RawLink
from branchlake_dagster.sda.sensor_kinds.declaration import SensorKind
from branchlake_dagster.sda.sensors.network import ALLOWED_LATENESS_S
from branchlake_dagster.sda.wire.columns import DECODED
from branchlake_dagster.sda.wire.links import decode_links

LINKS = SensorKind(
    source_kind="isl",
    name="links",
    decode=decode_links,
    decoded_schema=DECODED,
    contract=RawLink,
    claim="sat_no",
    measures=(*(f"pos_{axis}_km" for axis in "xyz"), *(f"vel_{axis}_km_s" for axis in "xyz")),
    envelope={
        **{f"pos_{axis}_km": f"{axis}_m / 1000" for axis in "xyz"},
        **{f"vel_{axis}_km_s": f"v{axis}_m_s / 1000" for axis in "xyz"},
        "position_unc_km": "sigma_position_m / 1000",
        "velocity_unc_km_s": "sigma_velocity_m_s / 1000",
    },
    allowed_lateness_s=ALLOWED_LATENESS_S["isl"],
)
