"""The index of blocks that workers have cached."""
