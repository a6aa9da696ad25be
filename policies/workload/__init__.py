"""Workloads: traces and generated requests, read as streams, described in numbers and plots."""
