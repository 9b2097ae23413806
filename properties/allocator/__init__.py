"""The allocator: KV allocators, block managers, request tables."""
