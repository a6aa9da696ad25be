"""A discrete-event simulator of sites and links that runs the gateway's own policy objects."""
