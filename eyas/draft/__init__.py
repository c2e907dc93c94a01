"""The EAGLE-3 draft model. Names load on first use: importing the package is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.draft.config import DraftShapeError, Eagle3DraftConfig
    from eyas.draft.init import init_weights
    from eyas.draft.io import load_draft, save_draft
    from eyas.draft.layers import DraftCache
    from eyas.draft.model import Eagle3DraftModel, TTTOutput
    from eyas.draft.rows import TrainBatch, counted_rows

_HOME = {
    "DraftCache": "layers",
    "DraftShapeError": "config",
    "Eagle3DraftConfig": "config",
    "Eagle3DraftModel": "model",
    "TTTOutput": "model",
    "TrainBatch": "rows",
    "counted_rows": "rows",
    "init_weights": "init",
    "load_draft": "io",
    "save_draft": "io",
}

__all__ = [
    "DraftCache",
    "DraftShapeError",
    "Eagle3DraftConfig",
    "Eagle3DraftModel",
    "TTTOutput",
    "TrainBatch",
    "counted_rows",
    "init_weights",
    "load_draft",
    "save_draft",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
