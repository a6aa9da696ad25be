"""gRPC stubs and the two files that convert between them and our types."""
