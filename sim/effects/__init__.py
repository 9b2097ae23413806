"""Keys of a scenario without effect: the rules, and the given keys that they meet."""
