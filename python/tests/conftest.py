"""Shared by all tests: what was skipped is said in lines that `cargo xtask` collects."""


def pytest_terminal_summary(terminalreporter):
    reasons = set()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons.add(reason.removeprefix("Skipped: "))
    for reason in sorted(reasons):
        terminalreporter.write_line(f"skipped: {reason}")
