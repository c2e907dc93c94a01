"""Training: the stage, and the names a training script of one's own needs, imported when first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.draft import Eagle3DraftConfig, Eagle3DraftModel
    from eyas.train.dataset import (
        BatchType,
        Eagle3SampleFileDataset,
        StandardizeFnSig,
        create_collate_fn,
        list_files,
        shift_batch,
        slice_and_pad_to_length,
        split_files,
        standardize_data_v0,
        standardize_data_v1,
    )
    from eyas.train.noise import AddGaussianNoise, AddUniformNoise, TransformTensors
    from eyas.vocab import build_vocab_mappings_from_distribution

__all__ = [
    "AddGaussianNoise", "AddUniformNoise", "BatchType", "Eagle3DraftConfig", "Eagle3DraftModel",
    "Eagle3SampleFileDataset", "StandardizeFnSig", "TransformTensors", "build_vocab_mappings_from_distribution",
    "create_collate_fn", "list_files", "shift_batch", "slice_and_pad_to_length", "split_files",
    "standardize_data_v0", "standardize_data_v1",
]  # fmt: skip

_ELSEWHERE = {
    "Eagle3DraftConfig": "eyas.draft",
    "Eagle3DraftModel": "eyas.draft",
    "build_vocab_mappings_from_distribution": "eyas.vocab",
    "AddGaussianNoise": "eyas.train.noise",
    "AddUniformNoise": "eyas.train.noise",
    "TransformTensors": "eyas.train.noise",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE.get(name, "eyas.train.dataset")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
