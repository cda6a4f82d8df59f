"""Runs are forked from a process that has imported everything already (docs/adr/0022-warm-launcher.md).

`launcher` is what Dagster is given; `templates` are its warm processes, seen from the launcher; `template` is
such a process, `worker` what a fork of it does. `channel` is how they speak, `process` how a run's process is
recognised, `sources` whether the imported code is still what the files say.
"""
