"""Assets that consume changes of their inputs: positions, affected partitions, inputs, outputs."""
