"""Drafts from a suffix automaton over each request's own text: a plugin for Foredraft."""
