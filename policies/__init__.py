"""Routing policies, the same objects live and simulated."""
