"""Assets that consume changes of their inputs: declarations, positions, partitions, inputs and outputs."""
