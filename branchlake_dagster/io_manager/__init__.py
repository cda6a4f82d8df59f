"""`NessieBranchIOManager`: writes a materialization to the run's branch and reports it to Dagster."""
