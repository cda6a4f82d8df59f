"""The Space Domain Awareness starter graph: catalogue, observations, fused tracks, conjunctions."""

from branchlake_dagster.extras import require

require("sda", "numpy", "scipy", "sgp4", wanted_by="The Space Domain Awareness pipeline")
