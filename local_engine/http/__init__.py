"""The embedded engine's OpenAI server."""
