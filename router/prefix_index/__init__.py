"""Which worker has cached which blocks."""
