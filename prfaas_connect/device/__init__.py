"""Accelerators as engines' plug-ins use them; needs torch."""
