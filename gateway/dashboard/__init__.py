"""The dashboard at `/dashboard`: what the gateway sees and does, live, for people."""
