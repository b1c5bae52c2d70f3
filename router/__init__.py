"""HTTP in, SSE out: validates, tokenises, places, detokenises."""
