"""`make faults`: make every fault, and print what the preflight says, as a Markdown table."""

import tempfile
from pathlib import Path

from eyas.progress import hushed
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


def plain(text: str, work: str) -> str:
    """Without the temporary folders, and in one cell of a table."""
    for folder in ("spoilt/", "base/"):
        text = text.replace(f"{work}/{folder}", "")
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
