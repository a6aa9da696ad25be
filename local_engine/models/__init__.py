"""Model architectures, written against `local_engine.models.base`."""
