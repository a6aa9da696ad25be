"""Calibrating KV codecs: KV of real text in, bases and steps out, and what they do to answers."""
