"""A server of known behaviour, to measure the client with."""
