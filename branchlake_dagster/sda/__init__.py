"""The Space Domain Awareness starter graph: catalogue, observations, fused tracks, conjunctions."""

from branchlake_dagster.extras import require_modules

require_modules("sda", "numpy", "scipy", "sgp4", needed_by="The Space Domain Awareness pipeline")
