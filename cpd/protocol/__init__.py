"""What both ends of a stream between processes of a cluster must agree on."""
