"""The model: its configuration, its weights, its forward pass."""
