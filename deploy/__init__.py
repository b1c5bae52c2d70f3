"""Places the processes of a cluster with Ray and keeps them running."""
