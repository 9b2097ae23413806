"""A run as a whole: how its service is built, how it ends, and how several processes simulate it."""
