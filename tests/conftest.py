"""One thread for each process of tests, and notes: lines that a test records with `record_property("note", …)` end the run's output.

Printing would not do: with several workers what a test prints is lost.
"""

import os

# The tests' tensors are tiny: a pool of threads in every worker and every process of a test would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# Whether the extra `measured` is installed changes no test but those that ask for it.
os.environ["FORETOKEN_KERNELS"] = "roofline"


def pytest_terminal_summary(terminalreporter):
    notes = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "note" and report.when == "call"
    ]
    if notes:
        terminalreporter.section("notes")
        for note in sorted(notes):
            terminalreporter.line(note)
