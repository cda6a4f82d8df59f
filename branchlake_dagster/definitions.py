"""The code location of this repository: branchlake's sensors and jobs, and the space pipeline."""

from branchlake_dagster.sda.graph.code_location import build_definitions
from branchlake_dagster.settings import Settings

defs = build_definitions(Settings())
