"""What a server tells of its work beside its answers: lines, the record, KV events, spans."""
