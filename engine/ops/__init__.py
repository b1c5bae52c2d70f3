"""Device-specific pieces of the forward pass, and which of them to use."""
