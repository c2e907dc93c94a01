"""Small real things for tests: a random decoder with a trained tokenizer and a template, and conversations."""

import json
from pathlib import Path

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SENTENCE = "the sun rises over a quiet river and small birds sing to every child who walks along its green banks"
WORDS = SENTENCE.split()


def make_target(folder: Path, *, layers: int = 6, seed: int = 0, **overrides) -> Path:
    """Save a random Llama (H 32, 4/2 heads, vocabulary 320) and a byte-level BPE tokenizer with ChatML."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    LlamaForCausalLM(LlamaConfig(**(shape | overrides))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_conversations(path: Path, n: int = 24, seed: int = 0) -> Path:
    """Write n short conversations (some with two turns) as JSONL; contents depend on the seed alone."""
    import random

    rng = random.Random(seed)
    with open(path, "w") as f:
        for i in range(n):
            messages = []
            for _ in range(1 + (i % 4 == 3)):
                messages.append({"role": "user", "content": f"{i} " + " ".join(rng.choices(WORDS, k=6))})
                messages.append({"role": "assistant", "content": " ".join(rng.choices(WORDS, k=12))})
            f.write(json.dumps({"id": f"c{i}", "category": "ab"[i % 2], "messages": messages}) + "\n")
    return path
