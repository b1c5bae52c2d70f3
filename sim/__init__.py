"""Discrete-event simulation of clusters with the real policy, scheduler and block pool (docs/simulator.md)."""
