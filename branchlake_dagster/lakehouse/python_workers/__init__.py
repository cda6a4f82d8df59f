"""The Python processes of the embedded Spark server: started within milliseconds, and not left behind.

Spark starts a daemon for each Connect session whose frames run Python (`mapInArrow`, UDFs), and that one
forks the workers. Each worker imported pandas, Arrow and PyIceberg anew: two to four seconds of processor
a worker, whatever a session had to do. The daemons of an embedded server are forked from one process that
has them imported.
"""
