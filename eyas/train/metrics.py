"""What a run measured, as plain numbers: JSON lines in `metrics.jsonl`, and the same for TensorBoard."""

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """Rows `{"step", "train": {...}}` and `{"step", "eval": {...}}`; a list is drawn as `name/0`, `name/1`.

    Rows after `step`, the optimiser steps already done, are a killed process's and dropped.
    """

    def __init__(self, folder: Path, step: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if step and path.is_file() else []
        whole = [line for line in lines if line.endswith("}}")]  # a kill may have cut the last row short
        path.write_text("".join(line + "\n" for line in whole if json.loads(line)["step"] <= step))
        self._file = open(path, "a")  # noqa: SIM115  closed by close()
        self._board = SummaryWriter(str(folder / "tb"), purge_step=step + 1)

    def write(self, step: int, kind: str, row: dict[str, Any]) -> None:
        """One row; values are numbers, None or lists of them (None is not drawn)."""
        self._file.write(json.dumps({"step": step, kind: row}, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in row.items():
            parts = {f"/{i}": x for i, x in enumerate(value)} if isinstance(value, list) else {"": value}
            for part, x in parts.items():
                if x is not None:
                    self._board.add_scalar(f"{kind}/{name}{part}", x, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()
