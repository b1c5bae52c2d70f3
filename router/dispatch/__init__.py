"""The life of a request between router and workers, and the sessions with the workers."""
