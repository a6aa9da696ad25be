"""KvPort, engine side: control over a unix socket, KV bytes through shared memory."""
