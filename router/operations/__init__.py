"""Answers for operators: the cluster's state, and where requests went."""
