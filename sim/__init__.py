"""Discrete-event simulation of whole clusters with the real policy, scheduler and block pool (docs/simulator.md)."""
