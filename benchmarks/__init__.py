"""One script per claim; `python -m benchmarks run NAME` writes JSON with machine, versions and seeds."""
