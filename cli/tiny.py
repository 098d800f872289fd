"""The embedded tiny model: a Qwen3-style network, its tokenizer and long-tailed chat data, built on disk.

Nothing is downloaded: the weights are random, the byte-pair tokenizer is trained on random words, and the data sets
are drawn from documented distributions. It is small enough that a CPU trains hundreds of optimizer steps a minute,
and real enough that ms-swift treats it as any other Qwen3.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_LENGTH = 2048  #: positions of the model, tokens


@dataclass(frozen=True)
class ModelSize:
    """Architecture of a tiny model."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int


SIZES = {
    "S": ModelSize(64, 128, 4, 4, 2),  #: about 0.2 M parameters
    "T": ModelSize(64, 128, 16, 4, 2),  #: about 0.7 M parameters, deep
    "M": ModelSize(256, 512, 8, 8, 4),  #: about 6 M parameters
}


@dataclass(frozen=True)
class LengthDistribution:
    """Answer lengths in tokens: lognormal with parameters `mu` and `sigma`, clipped to [shortest, longest]."""

    mu: float
    sigma: float
    shortest: int = 4
    longest: int = 1480

    def sample(self, count: int, seed: int = 0) -> list[int]:
        """`count` lengths."""
        rng = random.Random(seed)
        return [
            int(min(self.longest, max(self.shortest, rng.lognormvariate(self.mu, self.sigma)))) for _ in range(count)
        ]


SHORT = LengthDistribution(3.75, 1.0)  #: mean about 70 tokens with a long tail, as in chat data
LONG = LengthDistribution(5.25, 0.85)  #: mean about 270 tokens, as in document data
BURST = LengthDistribution(6.6, 0.25, shortest=400, longest=1400)  #: a run of long sequences, mean about 760


def _words(rng: random.Random, count: int = 400) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(rng.choice(letters) for _ in range(rng.randint(2, 7))) for _ in range(count)]


def build_model(directory: str | os.PathLike[str], size: str = "S", seed: int = 0, dropout: float = 0.0) -> Path:
    """Write a tiny Qwen3 model with its tokenizer to `directory` (kept if it is already there) and return the path."""
    out = Path(directory)
    if (out / "model.safetensors").exists():
        return out
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    rng = random.Random(seed)
    words = _words(rng)
    corpus = [" ".join(rng.choice(words) for _ in range(50)) for _ in range(300)]
    corpus += ["system\n", "user\n", "assistant\n", "You are a helpful assistant."]
    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=_SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[_SPECIAL_TOKENS[1], *_SPECIAL_TOKENS[3:]],
        model_max_length=MAX_LENGTH,
        chat_template=_CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(out)
    shape = SIZES[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.hidden_size // shape.heads,
        max_position_embeddings=MAX_LENGTH,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(out)
    return out


class AnswerText:
    """Random text of an exact number of tokens in the tiny tokenizer."""

    def __init__(self, model_dir: Path, rng: random.Random) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
        self._rng = rng
        vocabulary = sorted(self._tokenizer.get_vocab())
        self._words = [w[1:] for w in vocabulary if w.startswith("Ġ") and len(w) > 3]

    def draw(self, tokens: int) -> str:
        """Text of about `tokens` tokens (exact but for a merge at the cut)."""
        text = " ".join(self._rng.choice(self._words) for _ in range(tokens))
        return self._tokenizer.decode(self._tokenizer.encode(text)[:tokens])


def _rows(text: AnswerText, rng: random.Random, lengths: Sequence[int], kind: str) -> Iterator[dict[str, Any]]:
    for i, length in enumerate(lengths):
        messages = [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": text.draw(length)}]
        row: dict[str, Any] = {"messages": messages}
        if kind == "pretrain":
            row = {"messages": [messages[1]]}
        elif kind == "dpo":
            row["rejected_response"] = text.draw(
                max(4, int(length * rng.uniform(0.5, 1.5))) if length < 900 else length
            )
        elif kind == "kto":
            row["label"] = rng.random() < 0.5
        yield row


def write_data(
    path: str | os.PathLike[str],
    model_dir: str | os.PathLike[str],
    lengths: Sequence[int],
    seed: int = 1,
    kind: str = "sft",
) -> Path:
    """Write a JSONL data set for ms-swift and return its path.

    Args:
        path: File to write.
        model_dir: Directory of `build_model`, for its tokenizer.
        lengths: Answer lengths in tokens (see `LengthDistribution.sample`).
        seed: Of the text.
        kind: "sft", "pretrain", "dpo" or "kto".
    """
    rng = random.Random(seed)
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = AnswerText(Path(model_dir), rng)
    with out.open("w", encoding="utf-8") as file:
        for row in _rows(text, rng, lengths, kind):
            file.write(json.dumps(row) + "\n")
    return out


def training_arguments(
    model_dir: str | os.PathLike[str], data: str | os.PathLike[str], output_dir: str | os.PathLike[str]
) -> list[str]:
    """Arguments that let `swift sft` (or pt, rlhf) train the tiny model offline."""
    return [
        "--model", str(model_dir), "--model_type", "qwen3", "--template", "qwen3", "--dataset", str(data),
        "--check_model", "false", "--output_dir", str(output_dir), "--add_version", "false",
    ]  # fmt: skip
