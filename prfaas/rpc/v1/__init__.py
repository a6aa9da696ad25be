"""Generated stubs of rpc v1; regenerate with `make proto`."""
