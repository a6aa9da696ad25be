"""Paged KV: blocks and their prefix cache, the pool's tensors, and attention over them."""
