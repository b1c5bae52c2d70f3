"""Makes a model directory of a GGUF file: a link to the file, and what else a Hugging Face checkpoint has.

Each process reads configuration, tokenizer and chat template from such a directory. It lies in the user's cache
directory, under a digest of the file's path, size and time, so that a changed file gets a new one.
"""

import hashlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from cpd.common.errors import CheckpointError
from engine.model.gguf_file import GGUF_FILE, GgufFile, read_gguf

_FAMILIES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""model_type and class of each architecture; one of Llama with experts is Mixtral."""

_WORD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "llama-bpe": _WORD % "{1,3}",
    "qwen2": _WORD % "",
    "deepseek-r1-qwen": _WORD % "",
}
"""How texts are cut before byte pairs are merged; None for GPT-2's own way."""

_FREQUENCIES = "rope_freqs.weight"

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that have precedence over all others."""

_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
"""Control tokens that end an output, whether or not the file names them as such, as in llama.cpp."""


def directory_of(path: Path) -> Path:
    """Returns the directory of a GGUF file, made the first time.

    Raises:
        CheckpointError: The file is damaged, or its architecture or tokenizer is not supported.
    """
    path = path.absolute()  # in Hugging Face's cache it is a link, and only the link has the model's name
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    key = f"{path} {found.st_size} {found.st_mtime_ns} {version('cpd')}"
    home = _home()
    directory = home / hashlib.blake2b(key.encode(), digest_size=16).hexdigest() / path.stem
    if directory.is_dir():
        return directory
    file = read_gguf(path)
    try:
        contents = {**_config_files(file), **_tokenizer_files(file)}
    except CheckpointError:
        raise
    except Exception as error:  # of tokenizers, and of fields whose types are not what they should be
        raise CheckpointError(f"{path} is damaged: its metadata can't be used ({error})") from error
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            unfinished = Path(scratch, "model")
            unfinished.mkdir()
            for name, text in contents.items():
                (unfinished / name).write_text(text, encoding="utf-8")
            (unfinished / GGUF_FILE).symlink_to(path.resolve())
            unfinished.replace(directory)
    except OSError as error:
        if not directory.is_dir():  # another process was faster
            raise CheckpointError(f"{home} can't be written ({error}); set XDG_CACHE_HOME") from None
    return directory


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cpd", "gguf")


class _Fields:
    """The metadata of one file, by the names without its architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def get(self, name: str, default: Any = None) -> Any:
        metadata = self.file.metadata
        return metadata.get(f"{self.file.architecture}.{name}", metadata.get(name, default))

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"{self.file.path}: the field {name} is missing")
        return value

    def texts(self, name: str) -> list[str]:
        value = self.need(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"{self.file.path}: the field {name} must be a list of texts")
        return value

    def token(self, name: str) -> int | None:
        """Returns the number of the token with this role; None if the file names none."""
        number, count = self.get(f"tokenizer.ggml.{name}_token_id"), len(self.texts("tokenizer.ggml.tokens"))
        if number is not None and not (isinstance(number, int) and 0 <= number < count):
            raise CheckpointError(f"{self.file.path}: {name}_token_id is {number}, and there are {count} tokens")
        return number

    @property
    def head_dim(self) -> int:
        dim: int = self.get("attention.key_length") or self.need("embedding_length") // self.need(
            "attention.head_count"
        )
        return dim


def _config_files(file: GgufFile) -> dict[str, str]:
    fields = _Fields(file)
    if fields.get("split.count", 1) != 1:  # only the first of them has an architecture
        raise CheckpointError(f"{file.path} is one of several files; join them with `llama-gguf-split --merge`")
    if file.architecture not in _FAMILIES:
        raise CheckpointError(
            f"{file.path}: architecture {file.architecture} is not supported; supported are {', '.join(_FAMILIES)}"
        )
    model_type, architecture = _FAMILIES[file.architecture]
    config = {
        "hidden_size": fields.need("embedding_length"),
        "intermediate_size": fields.need("feed_forward_length"),
        "num_hidden_layers": fields.need("block_count"),
        "num_attention_heads": fields.need("attention.head_count"),
        "num_key_value_heads": fields.get("attention.head_count_kv", fields.need("attention.head_count")),
        "head_dim": fields.head_dim,
        "partial_rotary_factor": fields.get("rope.dimension_count", fields.head_dim) / fields.head_dim,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "max_position_embeddings": fields.need("context_length"),
        "rms_norm_eps": _shortest(fields.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(fields.get("rope.freq_base", 10_000.0)),
        "rope_scaling": _rope_scaling(fields),
        "vocab_size": len(fields.texts("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16",
    }
    if experts := fields.get("expert_count"):
        if model_type == "llama":
            model_type, architecture = "mixtral", "MixtralForCausalLM"
        config |= {
            "num_local_experts": experts,
            "num_experts_per_tok": fields.need("expert_used_count"),
            "moe_intermediate_size": fields.get("expert_feed_forward_length"),
            "norm_topk_prob": True,  # as llama.cpp computes it
        }
    eos, *ends = _ends(fields)
    config |= {"model_type": model_type, "architectures": [architecture], "eos_token_id": eos}
    known = {name: value for name, value in config.items() if value is not None}
    return {"config.json": json.dumps(known), "generation_config.json": json.dumps({"eos_token_id": [eos, *ends]})}


def _shortest(number: float) -> float:
    """The shortest number in decimals that float32 rounds to this one: the original one of the checkpoint."""
    return float(f"{number:.7g}")


def _rope_scaling(fields: _Fields) -> dict[str, Any] | None:
    if _FREQUENCIES in fields.file.tensors:
        return _llama3_scaling(fields)
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))  # the latter in older files
    kind = fields.get("rope.scaling.type", "none" if factor in (None, 1.0) else "linear")
    if kind == "none":
        return None
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if (value := fields.get(f"rope.scaling.{name}", 1.0)) != 1.0:
            raise CheckpointError(
                f"{fields.file.path}: rope.scaling.{name} is {value}, and only 1 is supported; use the model's "
                "safetensors"
            )
    scaling = {
        "rope_type": kind,
        "factor": _shortest(fields.need("rope.scaling.factor") if factor is None else factor),
        "original_max_position_embeddings": fields.get("rope.scaling.original_context_length"),
        "beta_fast": fields.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": fields.get("rope.scaling.yarn_beta_slow"),
    }
    return {name: value for name, value in scaling.items() if value is not None}


def _llama3_scaling(fields: _Fields) -> dict[str, Any]:
    """Finds the settings of Llama 3.1 that give the divisors of frequencies which a file has in their place."""
    file, tensor = fields.file, fields.file.tensors[_FREQUENCIES]
    dim, base = fields.head_dim, fields.get("rope.freq_base", 10_000.0)
    if tensor.type != "F32" or tensor.shape != (dim // 2,):
        raise CheckpointError(f"{file.path}: tensor {_FREQUENCIES} is {tensor.type} {list(tensor.shape)}")
    with file.path.open("rb") as opened:
        opened.seek(tensor.begin)
        divisors = struct.unpack(f"<{dim // 2}f", opened.read(tensor.end - tensor.begin))
    factor, low, high = _shortest(max(divisors)), 1.0, 4.0
    for original in (1 << bits for bits in range(8, 21)):
        rotations = (original / (2 * math.pi * base ** (2 * i / dim)) for i in range(dim // 2))
        smooth = (min(1.0, max(0.0, (each - low) / (high - low))) for each in rotations)
        expected = (1 / ((1 - each) / factor + each) for each in smooth)
        if all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(divisors, expected, strict=True)):
            settings = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            return {"rope_type": "llama3", **settings, "original_max_position_embeddings": original}
    raise CheckpointError(
        f"{file.path} scales single frequencies of RoPE in another way than Llama 3.1 ({_FREQUENCIES}), which is not "
        "supported; use the model's safetensors"
    )


def _ends(fields: _Fields) -> list[int]:
    """Tokens that end an output: of a text, and of a turn."""
    fields.need("tokenizer.ggml.eos_token_id")
    named = (fields.token(name) for name in ("eos", "eot", "eom"))
    types = fields.get("tokenizer.ggml.token_type", [])
    typed = enumerate(zip(fields.texts("tokenizer.ggml.tokens"), types, strict=False))
    others = (number for number, (token, of_type) in typed if of_type == _CONTROL and token in _ENDS)
    return list(dict.fromkeys([*(token for token in named if token is not None), *others]))


def _tokenizer_files(file: GgufFile) -> dict[str, str]:
    fields = _Fields(file)
    tokens = fields.texts("tokenizer.ggml.tokens")
    kinds = {"gpt2": _byte_pairs, "llama": _sentence_pieces}
    kind = fields.need("tokenizer.ggml.model")
    make: Callable[[_Fields, Sequence[str]], Tokenizer] | None = kinds.get(kind)
    if make is None:
        raise CheckpointError(f"{file.path}: tokenizer {kind} is not supported; supported are {', '.join(kinds)}")
    types = fields.get("tokenizer.ggml.token_type", [])
    if len(types) not in (0, len(tokens)):
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens, but the types of {len(types)}")

    def named(name: str) -> str | None:
        number = fields.token(name)
        return None if number is None else tokens[number]

    tokenizer = make(fields, tokens)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=of_type == _CONTROL, normalized=False)
            for token, of_type in zip(tokens, types, strict=False)
            if of_type in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos = named("bos")
    begins = kind == "llama" or fields.get("tokenizer.ggml.pre") == "llama-bpe"
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", begins):
        around = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
        tokenizer.post_processor = around
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            f"{name}_token": token
            for name in ("bos", "eos", "unknown", "padding")
            if (token := named(name)) is not None
        },
        "chat_template": fields.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    for ours, theirs in (("unk_token", "unknown_token"), ("pad_token", "padding_token")):
        if theirs in config:
            config[ours] = config.pop(theirs)
    known = {name: value for name, value in config.items() if value is not None}
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(known)}


def _byte_pairs(fields: _Fields, tokens: Sequence[str]) -> Tokenizer:
    split = fields.get("tokenizer.ggml.pre", "default")
    if split not in _SPLITS:
        raise CheckpointError(
            f"{fields.file.path}: the tokenizer cuts texts as {split}, which is not supported; supported are "
            f"{', '.join(_SPLITS)}"
        )
    split_merges = (merge.partition(" ") for merge in fields.texts("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in split_merges]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if wrong := next((merge for merge in merges if not vocabulary.keys() >= set(merge)), None):
        raise CheckpointError(f"{fields.file.path}: the tokenizer merges {' and '.join(wrong)}, which are no tokens")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    pattern = _SPLITS[split]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    cuts = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    if "qwen" in split:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentence_pieces(fields: _Fields, tokens: Sequence[str]) -> Tokenizer:
    """A tokenizer of SentencePiece: of two neighbours those are merged first whose sum has the best score."""
    scores = fields.need("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise CheckpointError(f"{fields.file.path} has {len(tokens)} tokens, but the scores of {len(scores)}")
    number = {token: index for index, token in enumerate(tokens)}
    pairs = [
        (token[:cut], token[cut:])
        for token in sorted(number, key=lambda token: -scores[number[token]])
        for cut in range(1, len(token))
        if token[:cut] in number and token[cut:] in number
    ]
    unknown = fields.token("unknown") or 0
    tokenizer = Tokenizer(models.BPE(number, pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    space = "▁"
    prefix = [normalizers.Prepend(space)] if fields.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", space)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
