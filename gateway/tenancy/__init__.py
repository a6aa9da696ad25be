"""Who may call, how much, and in which order: keys, quotas, turns and the audit log."""
