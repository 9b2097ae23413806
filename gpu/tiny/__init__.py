"""A tokenizer, a target and its drafts, small enough to be trained in minutes on a laptop."""
