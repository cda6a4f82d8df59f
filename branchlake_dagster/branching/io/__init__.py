"""`NessieBranchIOManager` and its two engines: Arrow through PyIceberg, and Spark."""
