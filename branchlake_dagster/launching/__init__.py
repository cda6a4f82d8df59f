"""A run launcher that forks runs from processes with all imports done (docs/adr/0022-warm-launcher.md).

`launcher` has the class that Dagster loads. `templates` starts and uses the launcher's warm processes.
`template` is the program of a warm process, and `worker` what each of its forks does. `process` identifies
the process of a run.
"""
