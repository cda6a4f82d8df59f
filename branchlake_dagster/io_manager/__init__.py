"""`NessieBranchIOManager`: one materialization, written to the run's branch, and its record in Dagster."""
