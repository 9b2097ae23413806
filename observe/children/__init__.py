"""Child processes: one supervisor (`child`), one wire (`wire`), and a pool of processes that do jobs (`pool`)."""
