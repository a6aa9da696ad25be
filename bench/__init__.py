"""Benchmarks: `make bench NAME=ttft [QUICK=1]`; results go to bench/results/NAME.json."""
