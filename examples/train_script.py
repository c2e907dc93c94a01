"""A training script of one's own: features -> dataset -> loader -> draft -> AdamW -> a saved draft.

    python examples/train_script.py --target MODEL --features DIR --output draft/

MODEL is the folder or hub id of the target; DIR a feature store (`runs/demo/extract/features/train`) or a folder
of `.pt` samples, one conversation each. `eyas train` does the same with packing without padding, checkpoints that
resume bit for bit, held-out acceptance and metrics; start from this script where you want a loop of your own.
"""

import argparse
import random
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from eyas.config import DraftConfig
from eyas.draft import init_weights, save_draft
from eyas.target.spec import TargetSpec, default_aux_layers
from eyas.target.weights import TargetWeights
from eyas.train import (
    AddGaussianNoise,
    Eagle3DraftConfig,
    Eagle3DraftModel,
    Eagle3SampleFileDataset,
    build_vocab_mappings_from_distribution,
    create_collate_fn,
    split_files,
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 draft on stored features.")
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--features", required=True, help="feature store, or folder of .pt samples")
    parser.add_argument("--output", required=True, help="folder of the trained draft")
    parser.add_argument(
        "--aux-layers", type=int, nargs="+", help="boundary ids in the .pt samples (a store says them)"
    )
    parser.add_argument("--draft-vocab-size", type=int, default=32000)
    parser.add_argument("--max-len", type=int, default=2048, help="tokens packed into one batch")
    parser.add_argument("--samples-per-batch", type=int, default=8)
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    spec = TargetSpec.load(args.target)  # reads config.json; the target itself is never loaded
    weights = TargetWeights(spec)  # its embedding, final norm and lm_head, from the safetensors shards

    noise = AddGaussianNoise(std=0.05)
    if (Path(args.features) / "store.json").is_file():
        train = Eagle3SampleFileDataset(args.max_len, datapath=args.features, transform=noise)
        val = None
        assert train.store is not None
        train.store.check(target_fingerprint=spec.fingerprint, last_hidden_state="pre_final_norm")
        aux_layers = list(train.store.meta.aux_layers)
    else:
        train_files, val_files = split_files(args.features, ratio=0.9, seed=args.seed)
        train = Eagle3SampleFileDataset(args.max_len, file_list=train_files, transform=noise)
        val = Eagle3SampleFileDataset(args.max_len, file_list=val_files) if val_files else None
        aux_layers = args.aux_layers or default_aux_layers(spec.num_layers)

    # The draft vocabulary: the most frequent ids among supervised tokens.
    frequency: dict[int, int] = {}
    for sample in train:
        for token in sample["input_ids"][sample["loss_mask"].bool()].tolist():
            frequency[token] = frequency.get(token, 0) + 1
    vocab_size = min(args.draft_vocab_size, spec.vocab_size)
    d2t, t2d = None, None
    if vocab_size < spec.vocab_size:
        d2t, t2d = build_vocab_mappings_from_distribution(frequency, vocab_size, spec.vocab_size)

    config = Eagle3DraftConfig.from_target(spec, DraftConfig(), aux_layers, vocab_size)
    model = Eagle3DraftModel(config, t2d=t2d, d2t=d2t)
    model.load_target(weights)
    init_weights(model, weights, spec)
    model.to(device)

    collate = create_collate_fn(args.max_len)
    loader = DataLoader(train, batch_size=args.samples_per_batch, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0)
    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(loader):
            batch = {key: value.to(device) for key, value in batch.items()}
            # every key of a batch is an argument of forward: hidden_states [1, L, A*H], input_ids [1, L], ...
            _tokens, loss, metrics = model(**batch, ttt_steps=args.ttt_steps, ttt_step_loss_decay=0.8)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            print(f"epoch {epoch} step {step} loss {loss.item():.4f} accuracy {metrics['full_acc_0'].item():.3f}")
        if val is not None:
            print(f"epoch {epoch} held-out loss {evaluate(model, val, collate, args, device):.4f}")

    save_draft(model, Path(args.output), {"target": spec.name, "target_fingerprint": spec.fingerprint})
    print(f"saved {args.output}")


@torch.no_grad()
def evaluate(model, dataset, collate, args, device) -> float:
    """Mean loss over batches of samples that were not trained on."""
    model.eval()
    losses = []
    for batch in DataLoader(dataset, batch_size=args.samples_per_batch, collate_fn=collate):
        batch = {key: value.to(device) for key, value in batch.items()}
        losses.append(model(**batch, ttt_steps=args.ttt_steps, ttt_step_loss_decay=0.8)[1].item())
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
