"""`NessieBranchIOManager`: one materialization, written to the run's branch, and what Dagster records about it."""
