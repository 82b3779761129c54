"""Side-by-side measurements on real shaped links: ``python -m benchmarks``."""
