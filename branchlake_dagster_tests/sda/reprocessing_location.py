"""A code location of the space pipeline that keeps records, for `branchlake reprocess -m`.

The environment names the folder of GP files, and the lake as usual.
"""

import os

from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.sda.shuffled_bytes import GP_FOLDER, space_pipeline

defs = space_pipeline(
    LakehouseResource.from_settings(Settings()), os.environ.get(GP_FOLDER, "gp"), keep_value=True
)
