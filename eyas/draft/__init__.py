"""The EAGLE-3 draft model."""

from eyas.draft.config import DraftShapeError, Eagle3DraftConfig
from eyas.draft.init import init_weights
from eyas.draft.io import load_draft, save_draft
from eyas.draft.model import Eagle3DraftModel, TTTOutput
from eyas.draft.rows import TrainBatch, counted_rows, row_plan

__all__ = [
    "DraftShapeError", "Eagle3DraftConfig", "Eagle3DraftModel", "TTTOutput", "TrainBatch", "counted_rows",
    "init_weights", "load_draft", "row_plan", "save_draft",
]  # fmt: skip
