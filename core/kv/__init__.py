"""KV memory: owners of slots, shared prefixes, moves after verify, and the sizes of reserves."""
