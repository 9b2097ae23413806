"""A page in the browser for the questions of `doctor`, `simulate` and `plan`, served to this machine alone."""
