"""`foredraft check`: components of ours, of yours, and of other servers."""
