"""What tests found out beside passing: a test notes a line with `record_property("note", …)`, and the run's last lines show it.

Printing would not do: with several workers what a test prints is lost.
"""


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
