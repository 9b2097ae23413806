"""The simulator's cost model: hardware × model × efficiency gives step times, host times and memory budgets."""
