"""The HTTP client of the load generator: one connection per stream, one timestamp per read."""
