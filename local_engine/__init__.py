"""The embedded engine: a continuous-batching torch engine for CPU and CUDA."""
