"""Other engines doing the same work, for paired benchmarks. Each runs in an interpreter of its own."""
