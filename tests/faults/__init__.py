"""Fault injection: every request gets the right tokens or a proper error, nothing hangs, nothing leaks.

points.py         injection points: where a worker can be held, delayed or made to fail
transport.py      a transport with injection points
worker.py         a worker process with injection points, controlled over a socket
fork_server.py    starts worker and router processes quickly
network.py        a network namespace per process, whose links can be cut or slowed down
redis_proxy.py    a proxy to Redis, which can be cut or slowed down
cluster.py        a cluster of such processes
matrix.py         each fault, to each part of the cluster, in each phase of a remote prefill
fetch_matrix.py   each fault, to either worker of a prefix fetch, in each phase of the fetch
move_matrix.py    each fault, to each side of a stream that moves, in each phase of the move
displacement_matrix.py  processes killed and stopped at each step in which one model displaces another
hang_ups.py       a client hangs up, at each stage of its request
test_crashes.py   a request during which two workers crash
soak.py           random faults under load
"""
