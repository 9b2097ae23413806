"""What is asked of a service that is planned: its traffic, by the hour, its limits, and what serving it costs."""
