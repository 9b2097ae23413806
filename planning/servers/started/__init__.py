"""What a server logged when it started, in the place of what would be computed."""
