"""Several models on the same devices, in virtual time."""
