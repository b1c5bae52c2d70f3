"""Faults at chosen moments: every request ends right or with a proper error, nothing hangs, nothing leaks.

points.py      moments of a transfer or a step at which something can be made to happen
transport.py   a transport with such points
worker.py      a worker process with such points, told over a socket what is to happen
"""
