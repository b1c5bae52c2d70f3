"""A device that takes as long as a profile says and computes nothing."""
