"""The engine: schedulers of continuous batching with speculative decoding."""
