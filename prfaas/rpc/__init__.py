"""gRPC stubs and the one file that converts between them and our types."""
