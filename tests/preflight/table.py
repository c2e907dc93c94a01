"""Print the faults that the tests make, and what is said of each: `python -m tests.preflight.table`."""

from tests.preflight import test_contracts, test_environment, test_imports

ROW = "| {} | {} | {} | {} | {} | {} |"


def main() -> None:
    print(ROW.format("fault", "stage", "check", "level", "message", "cure"))
    print(ROW.format(*["---"] * 6))
    for module, stage in (
        (test_environment, "environment"),
        (test_imports, "imports"),
        (test_contracts, "imports"),
    ):
        for f in module.FAULTS:
            cells = (f.name, stage, f.check, f.level, f.message, f.cure)
            print(ROW.format(*(cell.replace("|", "/") for cell in cells)))


if __name__ == "__main__":
    main()
