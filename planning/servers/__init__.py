"""Other serving engines: reads their launch commands as scenarios, and writes tuned tables in their formats."""
