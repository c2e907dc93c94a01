"""The EAGLE-3 draft: its tensors, the training-time test (TTT) over them, and decoding with a cache."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.draft.config import DraftShapeError, Eagle3DraftConfig
from eyas.draft.layers import DecoderLayer, DraftCache, Rope
from eyas.draft.rows import RowPlan, TrainBatch, row_plan
from eyas.errors import EyasError
from eyas.kernels.linear_kl import linear_kl
from eyas.kernels.rope import rotate
from eyas.kernels.send import send
from eyas.kernels.take_rows import take_rows
from eyas.kernels.ttt_attention import ttt_attention
from eyas.target.weights import TargetWeights
from eyas.vocab import check_vocab_mapping


class TTTOutput(NamedTuple):
    """One pass over a batch of N rows in K steps. Only `loss` has a gradient."""

    loss: Tensor  # scalar, fp32 or wider
    kl: Tensor  # [K] sums of KL(target || draft) over the counted rows, nats
    counts: Tensor  # [K] int64, counted rows
    hits: Tensor  # [K] int64, counted rows whose arg-max is the target's over the draft vocabulary
    overlap: Tensor  # [K] sums over counted rows of sum_v min(p, q): the expected acceptance of sampled drafts
    draft_tokens: Tensor  # [K, N] int64, the arg-max as a target id; -1 where a row is not counted
    hit: Tensor  # [K, N] bool, the rows of `hits`


class Eagle3DraftModel(nn.Module):
    """A one-layer EAGLE-3 draft over `config.draft_vocab_size` ids of its target.

    t2d [V] bool and d2t [Vd] int64 (offsets: target id = i + d2t[i]) are given together for a pruned vocabulary
    and may be left out for a full one; DraftShapeError (a ValueError) otherwise. `load_target` must follow before
    any pass; what it loads is no part of `state_dict()`. Trained tensors start as torch initialises them: see
    `init_weights`. lm_head is trained only when `config.train_lm_head`. Passes run in the parameters' dtype,
    softmax and loss in fp32 at least.
    """

    embed_tokens: Tensor | None
    target_lm_head: Tensor
    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: Eagle3DraftConfig, t2d: Tensor | None = None, d2t: Tensor | None = None):
        super().__init__()
        self.config = config
        _check_vocab(config, t2d, d2t)
        self.register_buffer("d2t", d2t if config.pruned else None)
        self.register_buffer("t2d", t2d if config.pruned else None)
        h, eps = config.hidden_size, config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.num_aux * h, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(h, eps) for _ in config.aux_layers)
        self.fc = nn.Linear(config.num_aux * h, h, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.norm = nn.RMSNorm(h, eps)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(config.train_lm_head)
        self.rope = Rope(config)
        self.register_buffer("embed_tokens", None, persistent=False)
        self.register_buffer("target_lm_head", None, persistent=False)

    def load_target(self, weights: TargetWeights) -> None:
        """Take the target's embedding, final norm and the lm_head rows of the draft vocabulary, all frozen.

        Raises DraftShapeError naming both sizes when the target is not the one this draft was made for.
        """
        embed, head, norm = weights.embed_tokens(), weights.lm_head(), weights.final_norm()
        expected = (self.config.vocab_size, self.config.target_hidden_size)
        for name, tensor in (("embed_tokens", embed), ("lm_head", head)):
            if tuple(tensor.shape) != expected:
                text = f"the target's {name} is {list(tensor.shape)}, the draft expects {list(expected)}"
                raise DraftShapeError(text, "this draft belongs to another target")
        like = self.fc.weight
        self.embed_tokens = embed.to(like.device)  # stays in its stored dtype: only a few rows are used at a time
        self.target_lm_head = head[self.draft_ids().to(head.device)].to(like)
        norm.register_buffer("weight", norm.weight, persistent=False)
        self.target_norm = norm.to(like.device)

    def draft_ids(self) -> Tensor:
        """[Vd] the target id of each draft id, ascending."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        return ids if self.d2t is None else ids + self.d2t

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Draft ids to target ids, any shape."""
        return ids if self.d2t is None else ids + self.d2t[ids]

    def fuse(self, aux: Tensor) -> Tensor:
        """aux [T, A * H] -> g [T, H]: fc over the aux states, after the norm that the config asks for."""
        aux = aux.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            parts = aux.chunk(self.config.num_aux, -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] target ids -> [T, H]"""
        if self.embed_tokens is None:
            raise EyasError("the draft has no target yet", "call model.load_target(weights) first")
        return F.embedding(input_ids, self.embed_tokens).to(self.fc.weight.dtype)

    def ttt(self, batch: TrainBatch, ttt_steps: int, decay: float, totals: Tensor | None = None) -> TTTOutput:
        """Loss = sum_k w_k KL_k / totals_k / sum_k w_k, with w_k = decay ** k and k = 0 ... ttt_steps - 1.

        KL_k is summed over the rows counted at step k, and totals [K] says how many of them the whole optimiser
        step has: the losses of its micro-batches add up to its exact mean. Default: this batch alone. A step k
        without any counted row adds nothing and keeps its weight below the line.
        """
        plan = (batch.plan or row_plan(batch, ttt_steps)).to(self.fc.weight.device)
        states = take_rows(torch.cat(self.unroll(batch, plan)), plan.loss_rows, ascending=False)  # [R, H]
        weights = decay ** torch.arange(ttt_steps, dtype=torch.float64)
        counted = send(plan.counts if totals is None else totals, states.device).clamp(min=1)
        step_scale = send(weights / weights.sum(), states.device) / counted  # [K]
        n = len(batch.input_ids)
        step = plan.loss_cells // n  # [R]
        scale = step_scale[step].to(torch.promote_types(states.dtype, torch.float32))
        targets, head = self.target_norm(batch.targets.to(states.dtype)), self.target_lm_head.to(states.dtype)
        loss, rows = linear_kl(states, self.lm_head.weight, targets, head, plan.loss_targets, scale)

        def by_cell(x: Tensor, other: float = 0) -> Tensor:  # [K, N]; its sums add up in a fixed order
            return x.new_full((ttt_steps * n,), other).index_copy_(0, plan.loss_cells, x).view(ttt_steps, n)

        hit, counts = by_cell(rows.hit), send(plan.counts, step.device)
        sums = by_cell(rows.kl).sum(1), counts, hit.sum(1), by_cell(rows.overlap).sum(1)
        return TTTOutput(loss, *sums, by_cell(self.to_target_ids(rows.token), -1), hit)

    def unroll(self, batch: TrainBatch, plan: RowPlan) -> list[Tensor]:
        """The states before lm_head of every step's rows: K tensors [A_k, H]."""
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        attention, heads = layer.self_attn, layer.self_attn.heads
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        (q_e, q_g), (k_e, k_g), (v_e, v_g) = (p.weight.chunk(2, 1) for p in projections)  # each [n * d, H]
        # Row t at step k and row t + k at step 0 see the same token: its embedding half is projected once.
        n = len(batch.input_ids)
        ids = F.pad(batch.input_ids, (0, len(plan.steps)))  # rows that look beyond the end are not counted
        embedded = layer.input_layernorm(self.embed(ids))  # [N + K, H]
        query_part = take_rows(embedded, plan.query_tokens) @ q_e.T  # [U, nh * d]
        key_part, value_part = embedded @ k_e.T, embedded @ v_e.T  # [N + K, nkv * d]

        cos, sin = self.rope.table(plan.last_position + 1, embedded)
        hidden = self.fuse(batch.aux)  # [N, H]
        normed = layer.hidden_norm(hidden)
        keys = rotate(heads(torch.addmm(key_part[:n], normed, k_g.T)), cos, sin, plan.positions)  # [N, nkv, d]
        values = heads(torch.addmm(value_part[:n], normed, v_g.T))
        own_keys = own_values = keys.new_empty(len(keys), keys.shape[1], 0, keys.shape[2])  # [A, nkv, k, d]
        states = []
        for k, step in enumerate(plan.steps):
            hidden = take_rows(hidden, step.kept)  # [A_k, H]
            normed = layer.hidden_norm(hidden) if k else take_rows(normed, step.kept)
            own_keys, own_values = (take_rows(x, step.kept) for x in (own_keys, own_values))
            if k:
                key = heads(torch.addmm(take_rows(key_part, step.tokens), normed, k_g.T))
                value = heads(torch.addmm(take_rows(value_part, step.tokens), normed, v_g.T))
                key = rotate(key, cos, sin, step.positions)
                own_keys = torch.cat([own_keys, key[:, :, None]], 2)
                own_values = torch.cat([own_values, value[:, :, None]], 2)
            query = heads(torch.addmm(take_rows(query_part, step.queries), normed, q_g.T))
            query = rotate(query, cos, sin, step.positions)  # [A_k, nh, d]
            attended = ttt_attention(query, keys, values, own_keys, own_values, step.seen)
            out = layer.finish(hidden, normed, attended)
            states.append(self.norm(out))
            hidden = states[-1] if self.config.norm_output else out
        return states

    def forward(
        self,
        hidden_states: Tensor | None = None,
        input_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        verifier_last_hidden_states: Tensor | None = None,
        ttt_steps: int = 3,
        ttt_step_loss_decay: float = 1.0,
        batch: TrainBatch | None = None,
        totals: Tensor | None = None,
    ) -> Any:
        """Training goes through here, so that wrapped models (DDP, FSDP) see it. Two forms, on shifted rows:

        `batch=` (a TrainBatch) returns `ttt`'s TTTOutput. The other takes one packed row of documents:
        hidden_states [1, L, A * H], input_ids [1, L], lengths [documents] (L beyond their sum is padding; default:
        one document), loss_mask [1, L] (default all), position_ids [1, L] (default 0, 1, ... in each document),
        verifier_last_hidden_states [1, L, H] before the final norm. It returns (draft_tokens, loss, metrics): K
        tensors [1, L] of draft-vocabulary ids, -1 where a row is not counted at that step; the loss of `ttt`;
        0-dim loss, loss_k (mean KL), full_acc_k (arg-max right at all steps 0..k, a share of the rows counted at
        k), cond_acc_k (the same, a share of those right until then). Without verifier_last_hidden_states:
        draft_tokens alone, of every row whose token lies in its document.
        """
        if batch is not None:
            return self.ttt(batch, ttt_steps, ttt_step_loss_decay, totals)
        assert hidden_states is not None and input_ids is not None
        length, last = input_ids.shape[1], verifier_last_hidden_states
        sizes = torch.tensor([length]) if lengths is None else lengths.cpu().flatten()
        n, ends = int(sizes.sum()), sizes.cumsum(0)
        if len(input_ids) != 1 or n > length:
            raise DraftShapeError(f"lengths {sizes.tolist()} do not fit input_ids {list(input_ids.shape)}")
        supervised = torch.ones(n, dtype=torch.bool)
        if last is None:
            last = hidden_states.new_zeros(1, n, self.config.hidden_size)
        elif loss_mask is not None:
            supervised = loss_mask[0, :n].cpu().bool()
        targets = last[0, :n][supervised.to(last.device)]
        documents = ((ends - sizes).repeat_interleave(sizes), ends.repeat_interleave(sizes))
        positions = None if position_ids is None else position_ids[0, :n]
        rows = TrainBatch(input_ids[0, :n], hidden_states[0, :n], targets, supervised, *documents, positions)
        out = self.ttt(rows, ttt_steps, ttt_step_loss_decay, totals)
        counted = out.draft_tokens >= 0  # [K, n]
        ids = torch.searchsorted(self.draft_ids(), out.draft_tokens).where(counted, -1)
        tokens = list(F.pad(ids, (0, length - n), value=-1)[:, None])
        if verifier_last_hidden_states is None:
            return tokens
        right = (counted & out.hit).cummin(0).values
        until_then = torch.cat([counted[:1], counted[1:] & right[:-1]]).sum(1).clamp(min=1)
        full, counts = right.sum(1), out.counts.clamp(min=1)
        metrics = {"loss": out.loss.detach()}
        by_step = {"loss": out.kl / counts, "full_acc": full / counts, "cond_acc": full / until_then}
        metrics |= {f"{name}_{k}": value for name, values in by_step.items() for k, value in enumerate(values)}
        return tokens, out.loss, metrics

    def new_cache(self, capacity: int) -> DraftCache:
        """An empty cache for one sequence of at most `capacity` rows."""
        shape = (self.config.num_key_value_heads, capacity, self.config.head_dim)
        return DraftCache(shape, *self.rope.table(capacity, self.fc.weight))

    @torch.no_grad()
    def decode_step(self, hidden: Tensor, input_ids: Tensor, cache: DraftCache) -> tuple[Tensor, Tensor]:
        """Append T rows to the cache; from the last one return its logits [Vd] and the state [H] it feeds back.

        hidden [T, H]: `fuse(aux)` of newly verified positions, or the state fed back (T = 1); input_ids [T]: the
        token after each position. A row's position is its place in the cache: crop the rows of rejected drafts.
        """
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        attention, heads = layer.self_attn, layer.self_attn.heads
        normed = layer.hidden_norm(hidden)
        both = torch.cat([layer.input_layernorm(self.embed(input_ids)), normed], -1)  # [T, 2H]
        cos, sin, positions = cache.turn(len(both))
        key = rotate(heads(attention.k_proj(both)), cos, sin, positions)
        keys, values = cache.append(key, heads(attention.v_proj(both)))
        # Only the last row is read, and the others are seen through their keys and values alone.
        last = slice(len(both) - 1, None)
        query = rotate(heads(attention.q_proj(both[last])), cos, sin, positions[last])
        query = query.transpose(0, 1)[None]  # [1, nh, 1, d]
        attended = F.scaled_dot_product_attention(query, keys[None], values[None], enable_gqa=True)
        out = layer.finish(hidden[last], normed[last], attended[0].transpose(0, 1))
        state = self.norm(out)
        return self.lm_head(state)[0], (state if self.config.norm_output else out)[0]


def _check_vocab(config: Eagle3DraftConfig, t2d: Tensor | None, d2t: Tensor | None) -> None:
    """Raises DraftShapeError or EyasError unless the tables say exactly the vocabulary of the config."""
    if config.pruned and t2d is None and d2t is None:
        sizes = f"draft_vocab_size {config.draft_vocab_size} of a target vocabulary of {config.vocab_size}"
        raise DraftShapeError(f"{sizes} needs a mapping, and none is given", "run `eyas vocab` to make one")
    for name, tensor, size in (("t2d", t2d, config.vocab_size), ("d2t", d2t, config.draft_vocab_size)):
        if tensor is not None and tuple(tensor.shape) != (size,):
            raise DraftShapeError(f"{name}: expected 1-D length {size}, got {tuple(tensor.shape)}")
    check_vocab_mapping(d2t, t2d, config.vocab_size)
