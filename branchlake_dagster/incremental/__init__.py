"""Assets that consume changes of their inputs: positions, affected partitions, and inputs and outputs of a step."""
