"""Code that all processes share, the performance model, and the `cpd` command."""
