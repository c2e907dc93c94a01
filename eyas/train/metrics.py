"""What a run measured, as plain numbers: JSON lines in `metrics.jsonl`, and the same for TensorBoard."""

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """Rows `{"step", "train": {...}}` and `{"step", "eval": {...}}`; a list is drawn as `name/0`, `name/1`.

    Args:
        folder: `logs/` of the stage.
        step: optimiser steps already done; rows of later steps, left by a killed process, are dropped.
    """

    def __init__(self, folder: Path, step: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if step and path.is_file() else []
        path.write_text("".join(line + "\n" for line in lines if _step(line) <= step))
        self._file = open(path, "a")  # noqa: SIM115  closed by close()
        self._board = SummaryWriter(str(folder / "tb"), purge_step=step + 1)

    def write(self, step: int, kind: str, row: dict[str, Any]) -> None:
        """One row; values are numbers, None or lists of them (None is not drawn)."""
        self._file.write(json.dumps({"step": step, kind: row}, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in row.items():
            for i, x in enumerate(value if isinstance(value, list) else [value]):
                if x is not None:
                    tag = f"{kind}/{name}/{i}" if isinstance(value, list) else f"{kind}/{name}"
                    self._board.add_scalar(tag, x, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _step(line: str) -> float:
    """The step of a row; a row cut short by a kill counts as later than any."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")
