"""Several processes of one gateway: workers that share a port, and one that keeps their state."""
