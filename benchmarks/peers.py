"""Time the training step of other EAGLE-3 trainers, by their own code, on the tensors that `train_step.py` uses.

    PEERS_DIR=peers python benchmarks/peers.py speculators --supervised 0.5

PEERS_DIR holds the unpacked wheels of speculators 0.9.0 and specforge 0.2.0 (pip download --no-deps; unzip). What
is set other than their defaults, and why, stands in each class. One line of JSON for each share, as train_step.py.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import types
from typing import Any

import torch
from torch import Tensor
from workload import SMALL, RandomTarget, Sizes, draft_ids, rows

PEERS = os.environ.get("PEERS_DIR", "peers")
DECAY, LR = 0.8, 1e-4


def llama(s: Sizes, length: int, **more: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=1,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim, rms_norm_eps=s.eps,
        max_position_embeddings=max(length + 64, 4096), hidden_act="silu", attention_bias=False, mlp_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta}, pad_token_id=None, **more,
    )  # fmt: skip


class Speculators:
    """Eagle3DraftModel and the body of their Trainer's epoch: fp32 weights under bf16 autocast, compiled forward,
    flex attention, packed documents, embedding and lm_head frozen, all as they ship it.

    Set otherwise: 7 steps with decay 0.8 (theirs: 3, 1.0), AdamW (Muon), full attention (a window of 2048), plain
    norms. SPEC_LOSS=eager takes their eager loss: the fused one trips an assertion of the compiler on torch 2.11.
    One module (their data loading, which a step does not use) is replaced by an empty one, and the compiler may
    make 64 variants instead of 8, beyond which their attention would fall back to its slow form.
    """

    def __init__(self, s: Sizes, target: RandomTarget, documents: int, length: int, steps: int, device: str):
        data: Any = types.ModuleType("speculators.train.data")
        data.BatchType = dict
        sys.modules["speculators.train.data"] = data
        if device == "cpu":
            os.environ.setdefault("SPEC_ATTN", "eager")
            os.environ.setdefault("SPEC_LOSS", "eager")
        torch._dynamo.config.recompile_limit = 64
        from speculators import SpeculatorsConfig, VerifierConfig
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from speculators.train.optimizers import build_optimizers

        layer = llama(s, length)
        layer._attn_implementation = os.environ.get("SPEC_ATTN", "simple_flex_attention")
        proposals = [GreedyTokenProposalConfig(speculative_tokens=steps)]
        verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=s.draft_vocab, norm_before_residual=False,
            norm_before_fc=False, fc_norm=False, norm_output=False, embed_requires_grad=False,
            eagle_aux_hidden_state_layer_ids=[2, 16, 29],
            speculators_config=SpeculatorsConfig(algorithm="eagle3", proposal_methods=proposals,
                                                 default_proposal_method="greedy", verifier=verifier),
        )  # fmt: skip
        with torch.device(device):
            self.model = Eagle3DraftModel(config)
        ids = draft_ids(s).to(device)
        t2d = torch.zeros(s.vocab, dtype=torch.bool, device=device).index_fill_(0, ids, True)
        self.model.load_vocab_mappings(t2d, ids - torch.arange(len(ids), device=device))
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(target.embedding)
            self.model.lm_head.weight.copy_(target.head[ids])
            self.model.verifier_lm_head.weight.copy_(target.head[ids])
            self.model.verifier_norm.weight.fill_(1.0)
        self.model = self.model.to(device).float().train()
        self.device, self.documents, self.length = device, documents, length
        loss = os.environ.get("SPEC_LOSS", "fused")
        self.arguments, _ = Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div", loss_implementation=loss, ttt_steps=steps, ttt_step_loss_decay=DECAY
        )
        wanted = types.SimpleNamespace(optimizer="adamw", lr=LR, weight_decay=0.0)
        self.optimizers = build_optimizers(self.model, wanted)
        self.note = {"loss": loss, "attention": layer._attn_implementation, "train_lm_head": False}

    def prepare(self, ids: Tensor, aux: Tensor, last: Tensor, mask: Tensor) -> None:
        document = torch.arange(self.documents).repeat_interleave(self.length)[None].to(self.device)
        position = (1 + torch.arange(self.length)).repeat(self.documents)[None].to(self.device)
        self.batch = {
            "hidden_states": aux[None], "input_ids": ids[None], "document_ids": document,
            "loss_mask": mask[None].to(self.device), "position_ids": position,
            "verifier_last_hidden_states": last[None],
        }  # fmt: skip

    def step(self) -> Tensor:
        half = torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else contextlib.nullcontext()
        with half:
            _, loss, _ = self.model(**self.batch, **self.arguments)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()


class Specforge:
    """LlamaForCausalLMEagle3 in OnlineEagle3Model, driven by their Eagle3TrainStrategy and BF16Optimizer: bf16
    weights with fp32 masters, flex attention, trained lm_head, teacher logits over the full vocabulary on all
    rows, one document a row, all as they ship it. Left out: their one-GPU FSDP wrapper and data plane.
    """

    def __init__(self, s: Sizes, target: RandomTarget, documents: int, length: int, steps: int, device: str):
        from specforge.algorithms.eagle3.model import OnlineEagle3Model
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
        from specforge.modeling.target.target_head import TargetHead
        from specforge.optimizer import BF16Optimizer
        from specforge.runtime.contracts import TrainBatch
        from specforge.training.strategies.base import Eagle3TrainStrategy

        backend = "flex_attention" if device == "cuda" else "sdpa"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        layer, ids = llama(s, length, draft_vocab_size=s.draft_vocab, pretraining_tp=1), draft_ids(s).to(device)
        with torch.device(device):
            model = LlamaForCausalLMEagle3(layer, attention_backend=backend)
        model.freeze_embedding()
        model = model.to(device, dtype)
        with torch.no_grad():
            model.embed_tokens.weight.copy_(target.embedding)
            model.lm_head.weight.copy_(target.head[ids])
            model.t2d.zero_()
            model.t2d[ids] = True
            model.d2t.copy_(ids - torch.arange(len(ids), device=device))
        with tempfile.TemporaryDirectory() as folder:
            layer.save_pretrained(folder)  # TargetHead reads its sizes from a model folder
            head = TargetHead(folder).to(device, dtype)
        with torch.no_grad():
            head.fc.weight.copy_(target.head)
        head.freeze_weights()
        trained = OnlineEagle3Model(model, length=steps, attention_backend=backend).train()
        self.strategy = Eagle3TrainStrategy(trained, target_head=head.eval(), ploss_decay=DECAY)
        self.optimizer = BF16Optimizer(model, lr=LR, total_steps=100000, warmup_ratio=0.0)
        self.batch_type, self.device, self.shape = TrainBatch, device, (documents, length)
        self.note = {"attention": backend, "train_lm_head": True}

    def prepare(self, ids: Tensor, aux: Tensor, last: Tensor, mask: Tensor) -> None:
        def rows_back(x: Tensor) -> Tensor:
            """[B, T, ...], a token later: their TargetHead shifts tokens and targets to the left."""
            x = x.view(*self.shape, *x.shape[1:])
            return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)

        tensors = {
            "input_ids": rows_back(ids), "target": rows_back(last), "hidden_state": aux.view(*self.shape, -1),
            "loss_mask": mask.view(self.shape).to(self.device).long(),
            "attention_mask": torch.ones(self.shape, dtype=torch.long, device=self.device),
        }  # fmt: skip
        names = [str(i) for i in range(self.shape[0])]
        kind = {"target_repr": "hidden_state"}
        self.batch = self.batch_type(sample_ids=names, strategy="eagle3", tensors=tensors, metadata=kind)

    def step(self) -> Tensor:
        loss = self.strategy.forward_loss(self.batch).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("who", choices=["speculators", "specforge"])
    parser.add_argument("--supervised", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0])
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, PEERS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, stored = SMALL if args.small else Sizes(), torch.bfloat16 if device == "cuda" else torch.float32
    kind = {"speculators": Speculators, "specforge": Specforge}[args.who]
    peer = kind(sizes, RandomTarget(sizes, device, stored), args.documents, args.length, args.ttt_steps, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for share in args.supervised:
        peer.prepare(*rows(sizes, share, args.documents, args.length, args.ttt_steps, device, stored))
        seconds = []
        for step in range(args.steps + 3):
            if step == 3 and device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            wait()
            started = time.perf_counter()
            loss = peer.step()
            wait()
            seconds.append(time.perf_counter() - started)
        middle = sorted(seconds[3:])[args.steps // 2]
        result = {
            "who": args.who, "supervised": share, "documents": args.documents, "length": args.length,
            "ttt_steps": args.ttt_steps, "tok_s": round(args.documents * args.length / middle),
            "step_ms": round(middle * 1e3, 2), "first_step_s": round(seconds[0], 2), "loss_last": float(loss),
        }  # fmt: skip
        if device == "cuda":
            result["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        print(json.dumps(result | peer.note), flush=True)


if __name__ == "__main__":
    main()
