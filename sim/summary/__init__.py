"""What a run has shown, as numbers by name, and how near it was to what can be served."""
