"""The agents: everything about KV in motion between clusters."""
