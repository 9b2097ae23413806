"""Components as the contracts see them: ours, and others that the suite was tried on."""
