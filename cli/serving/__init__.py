"""`foredraft serve`, and how its server is reached and watched."""
