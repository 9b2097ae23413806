"""Other serving engines: their launch commands read as scenarios, and tuned tables written as they take them."""
