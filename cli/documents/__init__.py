"""The documents that commands print with `--json`, as classes. (The answers of the planning commands are where they are
made.)"""
