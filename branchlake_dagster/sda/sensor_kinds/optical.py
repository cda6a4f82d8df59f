"""The sensor kind of telescopes, which serve items of JSON (`wire.optical`)."""

from __future__ import annotations

from branchlake_dagster.sda.contracts.raw import RawOptical
from branchlake_dagster.sda.sensor_kinds.declaration import ON_GROUND, SensorKind
from branchlake_dagster.sda.sensors.network import ALLOWED_LATENESS_S
from branchlake_dagster.sda.wire.columns import DECODED
from branchlake_dagster.sda.wire.optical import decode_optical

OPTICAL = SensorKind(
    source_kind="optical",
    name="optical",
    decode=decode_optical,
    decoded_schema=DECODED,
    contract=RawOptical,
    # Without the time, an item that corrects another one would have the same id.
    record_id=("obs_id", "timestamp_ns"),
    measures=("ra_deg", "declination_deg"),
    envelope={
        **ON_GROUND,
        "ra_deg": "degrees(ra_rad)",
        "ra_unc_deg": "sigma_arcsec / 3600 / cos(dec_rad)",
        "declination_deg": "degrees(dec_rad)",
        "declination_unc_deg": "sigma_arcsec / 3600",
    },
    allowed_lateness_s=ALLOWED_LATENESS_S["optical"],
)
