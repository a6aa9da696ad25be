"""What several gateways share: stores, and the loop that keeps a gateway in touch with one."""
