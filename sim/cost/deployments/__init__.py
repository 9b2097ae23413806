"""Published deployments, and what they say of others."""
