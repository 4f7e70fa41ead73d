"""Setting a machine up: what it has, what settings suit it, and the service that runs them."""
