"""Requests as clients write them, and how the server reads them."""
