"""How many drafts of each row a round verifies, by confidences."""
