"""What the whole server shares: the port of bodies, errors, limits, connections."""
