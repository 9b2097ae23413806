"""The installed distribution: how to install its extras, and the former name of the project."""
