"""The contract of a transport: KV and draft input go from a prefill worker to a decode worker, over a link that promises nothing."""
