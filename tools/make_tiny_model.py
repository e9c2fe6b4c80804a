"""Make a model of 300 kB that vLLM serves on a CPU: random weights, a tokenizer of bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}assistant:"
)


def main(folder: Path) -> None:
    """Write the model to a folder; the same weights each time."""
    torch.manual_seed(7)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {_END: 0, **{letter: n for n, letter in enumerate(alphabet, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, pad_token=_END, chat_template=_TEMPLATE
    )
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
