"""Child processes: one supervisor (`child`), one wire (`wire`), a pool of processes that do jobs (`pool`), and how many
cores there are for them (`cores`)."""
