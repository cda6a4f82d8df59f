"""The sensor kind of radars, which send datagrams of 64 bytes (`wire.radar`)."""

from __future__ import annotations

from branchlake_dagster.sda.contracts.raw import RawRadar
from branchlake_dagster.sda.sensor_kinds.declaration import ON_GROUND, SensorKind
from branchlake_dagster.sda.sensors.network import ALLOWED_LATENESS_S
from branchlake_dagster.sda.wire.columns import DECODED
from branchlake_dagster.sda.wire.radar import decode_radar

RADAR = SensorKind(
    source_kind="radar",
    name="radar",
    decode=decode_radar,
    decoded_schema=DECODED,
    contract=RawRadar,
    measures=("range_km", "range_rate_km_s", "azimuth_deg", "elevation_deg"),
    envelope={
        **ON_GROUND,
        "range_km": "range_m / 1000",
        "range_unc_km": "sigma_range_m / 1000",
        "range_rate_km_s": "range_rate_m_s / 1000",
        "range_rate_unc_km_s": "sigma_range_rate_m_s / 1000",
        "azimuth_deg": "degrees(az_rad)",
        "azimuth_unc_deg": "degrees(sigma_angle_rad) / cos(el_rad)",
        "elevation_deg": "degrees(el_rad)",
        "elevation_unc_deg": "degrees(sigma_angle_rad)",
    },
    allowed_lateness_s=ALLOWED_LATENESS_S["radar"],
)
