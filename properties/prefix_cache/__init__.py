"""The prefix cache: radix trees, hash tables of blocks, and the request tables that start from them."""
