"""The run's own Nessie branch: its name, its tags on the run, the run that owns it, the publisher's claim."""
