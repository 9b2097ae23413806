"""A run as a whole: how it ends, and how several processes simulate it."""
