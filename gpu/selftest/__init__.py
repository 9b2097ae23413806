"""One command for a machine that has never run this:
is it right here, in the order of what would fail first, and how fast is it?"""
