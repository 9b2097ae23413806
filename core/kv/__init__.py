"""KV memory: who owns which slot, which prefix is shared, what moves after verify, how much is reserved."""
