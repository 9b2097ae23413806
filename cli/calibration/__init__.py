"""`foredraft calibrate`: to a server's timing, to the acceptance of drafts, to our own executor."""
