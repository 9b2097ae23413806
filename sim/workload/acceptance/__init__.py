"""Reads what servers and recordings tell of accepted drafts."""
