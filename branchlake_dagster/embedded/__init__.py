"""The embedded servers, Nessie and Spark Connect, which run on loopback for one state folder.

`worker_daemon`, `warm_worker` and `idle_daemons` are about Spark's Python processes. Spark starts a daemon
for each Connect session whose frames run Python (`mapInArrow`, UDFs), and the daemon forks the workers. If
each worker imported pandas, Arrow and PyIceberg itself, it would cost two to four seconds of processor time.
The daemons of an embedded server are therefore forked from one process that has imported them.
"""
