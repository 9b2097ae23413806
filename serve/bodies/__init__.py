"""What a server can serve: a checkpoint that is decoded, or a deployment that is simulated."""
