"""The project as something that is installed: how to install more of it, and what its first version was called."""
