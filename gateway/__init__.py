"""The regional gateway: decides where each request prefills and relays it."""
