"""Components as the contracts see them: ours, and one that the suite was tried on and that is not ours."""
