"""Requests as metrics see them: columns of open ones, those that two engines share, and their lives
from event to event."""
