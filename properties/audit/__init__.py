"""The audit of an event log that any engine wrote: find its contradictions."""
