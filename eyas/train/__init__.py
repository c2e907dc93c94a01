"""Training: the stage, and the names that a training script of one's own needs."""

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
