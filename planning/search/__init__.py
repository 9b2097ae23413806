"""Searches over one number, and the loop that runs several of them at a time.

A search is a generator: it yields the settings of runs that it wants, is sent their outcomes, and returns what it
found. So many searches share the same processes, and none waits for another.
"""
