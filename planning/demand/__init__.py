"""The traffic that a service is planned for, by the hour, and what serving it costs."""
