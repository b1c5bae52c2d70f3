"""The HTTP client: one connection a stream, a time stamp a read."""
