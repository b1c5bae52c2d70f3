"""What `cpd bench transfer` measures: pages between two processes, beside UCX's own benchmark.

settings.py   what to measure
measure.py    the sender, which pushes and takes the time
receiver.py   the receiver, a separate process on this or another host
perftest.py   UCX's `ucx_perftest` between the same two hosts
result.py     the figures
"""
