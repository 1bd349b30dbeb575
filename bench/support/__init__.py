"""What several benchmarks share. Not a benchmark, not part of the package."""
