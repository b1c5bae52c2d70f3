"""Faults at chosen moments: every request ends right or with a proper error, nothing hangs, nothing leaks.

points.py      moments of a transfer or a step at which something can be made to happen
transport.py   a transport with such points
nursery.py     starts processes quickly
network.py     machines that are none: links can be cut
cluster.py     a cluster of processes on such machines
matrix.py      what happens to whom, and when
fetches.py     the same while a decode worker has a prefix from another one's cache
soak.py        the same at random, under load
worker.py      a worker process with such points, told over a socket what is to happen
"""
