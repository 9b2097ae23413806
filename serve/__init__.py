"""A server with OpenAI's interface, over real decode or over simulated time."""
