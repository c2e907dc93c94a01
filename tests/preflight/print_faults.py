"""`make faults`: make every fault, and print what the preflight says, as a Markdown table."""

import tempfile
from pathlib import Path

from eyas.progress import hushed
from tests.preflight import test_contracts, test_environment, test_imports
from tests.preflight.healthy import make_healthy
from tests.preflight.test_faults import FAULTS


def main() -> None:
    print("| fault | found by | finding | cure |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work, hushed():
        healthy = make_healthy(Path(work) / "base")
        for fault in FAULTS:
            stage, finding = fault.found(healthy, Path(work) / "spoilt")
            texts = (finding["message"], finding["hint"])
            message, hint = (plain(t, work) for t in texts)
            print(
                f"| {fault.name} | {stage} {finding['check']} | {finding['level']}: {message} | {hint} |",
                flush=True,
            )
    # These need a machine or a package that is broken: what their tests demand is printed.
    for module, stage in (
        (test_environment, "environment"),
        (test_imports, "imports"),
        (test_contracts, "imports"),
    ):
        for f in module.FAULTS:
            message, hint = (text.replace("|", "\\|") for text in (f.message, f.cure))
            print(f"| {f.name} | {stage} {f.check} | {f.level}: {message} | {hint} |")


def plain(text: str, work: str) -> str:
    """Without the temporary folders, and in one cell of a table."""
    for folder in ("spoilt/", "base/"):
        text = text.replace(f"{work}/{folder}", "")
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
