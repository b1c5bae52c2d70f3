"""The load generator. Knows only HTTP."""
