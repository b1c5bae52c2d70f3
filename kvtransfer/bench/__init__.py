"""What `cpd bench transfer` measures: pages between two processes, beside what UCX's own benchmark reaches.

settings.py   what to measure
far.py        the far end, which receives: a process of its own, on this host or another one
measure.py    the near end, which pushes and takes the time
perftest.py   UCX's `ucx_perftest`, between the same two ends
result.py     what came of it
"""
