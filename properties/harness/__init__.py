"""The harness: trials, operations, and the searches over them that every contract shares."""
