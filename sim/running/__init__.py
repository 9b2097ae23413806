"""A run as a whole: how its service is built, how it runs and ends, and how several processes simulate it."""
