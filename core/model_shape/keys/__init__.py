"""Keys of published files beside those that a family's readers ask for."""
