"""The installed distribution: how to install its extras."""
