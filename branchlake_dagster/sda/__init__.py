"""The Space Domain Awareness starter graph: it tracks satellites and warns of close approaches."""

from branchlake_dagster.extras import require_modules

require_modules("sda", "numpy", "scipy", "sgp4", needed_by="The Space Domain Awareness pipeline")
