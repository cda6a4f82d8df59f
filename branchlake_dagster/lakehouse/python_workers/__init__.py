"""The former package of `branchlake_dagster.embedded.worker_daemon`."""
