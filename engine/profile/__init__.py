"""Measures how long the steps of a model take on this device, for `cpd profile`."""
