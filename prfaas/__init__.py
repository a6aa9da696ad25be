"""Shared contracts of prfaas: everything the gateway, the agents and the engines agree on."""
