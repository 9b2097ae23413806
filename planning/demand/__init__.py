"""What is asked of a service that is planned: its traffic, by the hour, and its limits."""
