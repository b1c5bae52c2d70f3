"""Small Hugging Face checkpoints with random weights, and transformers as the oracle for their output.

Each directory is complete (weights, configuration, tokenizer, chat template), so a cluster can serve it. The weights
are larger than those of an untrained model, so that the greedy output varies.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

BOS, EOS, END_OF_TURN = "<|begin|>", "<|end|>", "<|turn|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '<|turn|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

_TEXT = """\
The copper door at the end of the corridor opens with the code four eight one seven.
A router knows what every worker has cached, and how loaded it is; a long prompt never makes others stutter.
Straße, naïve café, Ελληνικά, Привет мир, こんにちは世界, 你好,世界, 🙂🚀 — punctuation; "quotes" and (brackets)!
for i in range(10): print(f"{i:>3} squared is {i ** 2}")  # numbers 0123456789
"""

_BASE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4},
    "llama3": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "mistral_window": {"model_type": "mistral", "sliding_window": 40},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
}


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Writes a checkpoint of one of FAMILIES and returns its directory.

    Args:
        seed: Seed of the weights.
        dtype: Data type of the stored weights.
        max_shard_size: Maximum size of a file; small sizes make several files with an index.
        overrides: Fields of config.json. `vocab_size` defaults to slightly more than the tokenizer has.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    eos = tokenizer.token_to_id(EOS)
    fields = {
        **_BASE,
        "vocab_size": tokenizer.get_vocab_size() + 3,  # not a multiple of 8, and some ids have no token
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": eos,
        **FAMILIES[family],
        **overrides,
    }
    config = AutoConfig.for_model(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        _randomize(model)
    model.generation_config.eos_token_id = [eos, tokenizer.token_to_id(END_OF_TURN)]
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": fields["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def load_oracle(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Loads the checkpoint into transformers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model


@dataclass(frozen=True, slots=True)
class Greedy:
    """A greedy continuation.

    Attributes:
        token_ids: The new tokens.
        margins: For each token, the gap between the best and the second-best logit.
    """

    token_ids: list[int]
    margins: list[float]


@torch.inference_mode()
def oracle_generate(
    directory: Path, token_ids: Sequence[int], max_new_tokens: int, *, stop_token_ids: Sequence[int] = ()
) -> Greedy:
    """The tokens that transformers chooses greedily in float32, up to and including a stop token."""
    model = load_oracle(directory)
    cache, inputs = None, torch.tensor([list(token_ids)])
    result = Greedy([], [])
    while len(result.token_ids) < max_new_tokens:
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best, second = output.logits[0, -1].float().topk(2).values.tolist()
        token = int(output.logits[0, -1].argmax())
        result.token_ids.append(token)
        result.margins.append(best - second)
        if token in stop_token_ids:
            break
        inputs = torch.tensor([[token]])
    return result


@torch.inference_mode()
def oracle_logits(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Float32 logits after every token: [len(token_ids), vocabulary]."""
    logits: torch.Tensor = load_oracle(directory)(input_ids=torch.tensor([list(token_ids)])).logits[0]
    return logits


def _tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer: it encodes any text, and a character may span tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[AddedToken(token, special=True) for token in (BOS, EOS, END_OF_TURN)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    return tokenizer


def _randomize(model: PreTrainedModel) -> None:
    """Sets matrices to a gain of about one, norms to about one and biases to values that affect the output."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.1)
            elif parameter.ndim == 1:
                parameter.normal_(0.0, 0.2)
            elif "embed_tokens" in name:  # tied embeddings must be small, or every token would predict itself
                parameter.normal_(0.0, 0.2 if model.config.tie_word_embeddings else 0.5)
            else:
                parameter.normal_(0.0, 1.4 * parameter.shape[-1] ** -0.5)
