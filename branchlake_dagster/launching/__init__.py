"""A run launcher that forks runs from processes with all imports done (docs/adr/0022-warm-launcher.md).

`launcher` has the class that Dagster loads; it also starts the warm processes and sends runs to them.
`template` is the program of a warm process. `worker` executes one run in a fork of a warm process, and
identifies the run's process.
"""
