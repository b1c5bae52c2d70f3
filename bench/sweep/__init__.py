"""`cpd bench sweep`: one workload at several loads, or the highest rate that meets a latency target."""
