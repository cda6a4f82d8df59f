"""Which writers are alive: heartbeat files, and a failure detector that trusts no foreign clock."""
