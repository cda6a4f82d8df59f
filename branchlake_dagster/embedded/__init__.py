"""The embedded servers, Nessie and Spark Connect, which run on loopback for one state folder.

`worker_daemon` and `warm_worker` manage Spark's Python processes. Spark starts a daemon for
each Connect session whose frames run Python (`mapInArrow`, UDFs), and the daemon forks the workers. Importing
pandas, Arrow and PyIceberg in each worker would cost two to four seconds of processor time. So the daemons of
an embedded server are forked from one process that has imported them.
"""
