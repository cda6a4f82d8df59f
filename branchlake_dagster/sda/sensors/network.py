"""The simulated sensor network: ground radars and telescopes.

The sites are real places that host such sensors or could host them. The performance is generic and
fictitious.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """A ground sensor: geodetic WGS-84 coordinates, smallest usable elevation and longest usable range."""

    sensor_id: str
    lat_deg: float
    lon_deg: float
    alt_km: float
    mask_deg: float = 10.0
    max_range_km: float = 5_500.0


_DEEP = 45_000.0

RADARS = (
    Site("radar-01", 38.95, -104.7, 1.9),
    Site("radar-02", 64.29, -149.19, 0.2),
    Site("radar-03", 41.75, -70.54, 0.1),
    Site("radar-04", 76.57, -68.3, 0.4),
    Site("radar-05", 54.36, -0.67, 0.2),
    Site("radar-06", 50.62, 7.13, 0.3),
    Site("radar-07", 9.4, 167.48, 0.0),
    Site("radar-08", -21.82, 114.17, 0.0, max_range_km=_DEEP),
    Site("radar-09", 37.1, -5.6, 0.1),
    Site("radar-10", -46.53, 168.38, 0.0),
    Site("radar-11", 10.6, -85.5, 0.1),
    Site("radar-12", 39.0, 125.8, 0.1),
    Site("radar-13", -30.0, 23.0, 1.0),
    Site("radar-14", 42.62, -71.49, 0.1, max_range_km=_DEEP),
)

TELESCOPES = (
    Site("optical-01", 33.82, -106.66, 1.5, mask_deg=20, max_range_km=50_000),
    Site("optical-02", 20.71, -156.26, 3.0, mask_deg=20, max_range_km=50_000),
    Site("optical-03", -7.41, 72.45, 0.0, mask_deg=20, max_range_km=50_000),
    Site("optical-04", 28.3, -16.51, 2.4, mask_deg=20, max_range_km=50_000),
    Site("optical-05", -31.27, 149.06, 1.1, mask_deg=20, max_range_km=50_000),
    Site("optical-06", -30.17, -70.81, 2.2, mask_deg=20, max_range_km=50_000),
    Site("optical-07", 38.22, -6.63, 0.6, mask_deg=20, max_range_km=50_000),
    Site("optical-08", 43.65, 41.43, 2.0, mask_deg=20, max_range_km=50_000),
)


@dataclass(frozen=True)
class Noise:
    """The standard deviation of the simulated noise of each measured value."""

    range_m: float = 15.0
    range_rate_m_s: float = 0.05
    angle_rad: float = 3.0e-4
    optical_arcsec: float = 1.0
    position_m: float = 30.0
    velocity_m_s: float = 0.1


@dataclass(frozen=True)
class Tasking:
    """The numbers of objects and samples that a sensor observes in one window."""

    objects_per_radar: int = 300
    objects_per_telescope: int = 200
    samples_per_track: int = 6
    minimum_steps: int = 3
    isl_observers: int = 40
    isl_contacts: int = 6
    isl_partners: int = 4
    isl_range_km: float = 1_500.0


ALLOWED_LATENESS_S = {"radar": 0.1, "optical": 30.0, "isl": 10.0}
"""The largest regular time from measurement to receipt of each simulated kind, s."""

SUN_BELOW_DEG = 12.0
"""A telescope works when the Sun is this far below its horizon (nautical night)."""

CATALOGUE_TIMING_SIGMA_S = 0.04
"""One standard deviation of the time by which true objects are ahead of or behind their element sets, s.

The error along the track is the largest one of real element sets. 40 ms are 0.3 km in low orbit.
"""
