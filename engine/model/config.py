"""Shape of a model, read from the `config.json` of a Hugging Face checkpoint.

Every reason to refuse a checkpoint that shows without its weights is found here.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.errors import CheckpointError
from engine.model.scheme import READABLE, Scheme, read_scheme

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

Quantization = Literal["none", "int8", "int4"]

KvDtype = Literal["float32", "bfloat16", "float16", "int8"]
"""Type of the numbers in pages. Those in int8 have a scale in float32 for each token and head."""

_SCALE_BYTES = 4

_TOO_LARGE = 1 << 40
"""A config.json with a number this large is damaged."""

_MOST_LAYERS, _MOST_EXPERTS = 1 << 12, 1 << 17
"""Limits on layers, and on the experts of all layers: the names of all tensors are listed before any is looked up."""


@dataclass(frozen=True, slots=True)
class _ExpertFields:
    """What follows from model_type about experts, and transformers' defaults.

    Attributes:
        width_field: Field with the width of an expert.
        always_normalize: True if the weights of a token's experts always add up to 1; else `norm_topk_prob` says so.
        some_layers: True if `decoder_sparse_step` and `mlp_only_layers` choose the layers with experts; else all have.
    """

    count: int
    per_token: int
    width_field: str
    width: int | None = None
    always_normalize: bool = False
    some_layers: bool = False


@dataclass(frozen=True, slots=True)
class _Family:
    """What follows from model_type, and transformers' defaults for fields that older files leave out.

    Attributes:
        window: Layers that may have a sliding window: none; all, if `sliding_window` is set, or also only if
            `use_sliding_window` is; or those that `layer_types` or `max_window_layers` name, if it is.
    """

    architecture: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    window: Literal["none", "all layers", "all layers if used", "some layers if used"] = "some layers if used"
    sliding_window: int | None = 4096
    always_qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: _ExpertFields | None = None


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        "LlamaForCausalLM", max_position_embeddings=2048, window="none", attention_bias=True, mlp_bias=True
    ),
    "mistral": _Family("MistralForCausalLM", num_kv_heads=8, max_position_embeddings=131072, window="all layers"),
    "mixtral": _Family(
        "MixtralForCausalLM",
        num_kv_heads=8,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        theta=1e6,
        window="all layers",
        sliding_window=None,
        experts=_ExpertFields(8, 2, "intermediate_size", always_normalize=True),
    ),
    "qwen2": _Family("Qwen2ForCausalLM", num_kv_heads=32, always_qkv_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", num_kv_heads=32, head_dim=128, attention_bias=True, qk_norm=True),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        num_kv_heads=4,
        window="all layers if used",
        attention_bias=True,
        qk_norm=True,
        experts=_ExpertFields(128, 8, "moe_intermediate_size", 768, some_layers=True),
    ),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields beyond `factor` belong to the kind that reads them.

    Attributes:
        kind: How frequencies are scaled.
        theta: Base of the frequencies.
        factor: Extended context length / original context length.
        original_max_position: Original context length.
        low_freq_factor, high_freq_factor: Llama 3: bounds of the wavelengths that are interpolated.
        beta_fast, beta_slow: YaRN: the same bounds, as rotations over the original context.
        truncate: YaRN: True if the bounds are rounded to whole dimensions.
        attention_factor: Factor of the cosines and sines.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixture of experts, which takes the place of the MLP in some layers.

    Attributes:
        count: Experts of a layer.
        per_token: Experts that compute a token.
        width: Width of an expert's MLP.
        normalize: True if the weights of a token's experts add up to 1.
        layers: Layers that have experts, ascending.
    """

    count: int
    per_token: int
    width: int
    normalize: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder of the Llama family.

    Attributes:
        family: llama, mistral, mixtral, qwen2, qwen3 or qwen3_moe.
        intermediate_size: Width of the MLP, in layers without experts.
        qkv_bias, o_bias, mlp_bias: True if these linear layers have a bias.
        qk_norm: True if queries and keys are normalised per head.
        tie_embeddings: True if the LM head shares the embedding's weight.
        windows: For each layer the last tokens, itself included, that a token attends to; None for all.
        experts: None if no layer has experts.
        max_model_len: Longest prompt plus output, in tokens: the checkpoint's limit, or a shorter one that is served.
        dtype: The checkpoint's own type; None if config.json does not give one.
        scheme: How the checkpoint's weights are quantised; None if they are not, or if a GGUF file has them.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    windows: tuple[int | None, ...]
    experts: ExpertsConfig | None
    max_model_len: int
    dtype: Dtype | None
    scheme: Scheme | None = None

    @property
    def has_windows(self) -> bool:
        """True if a layer has a sliding window."""
        return any(window is not None for window in self.windows)

    @property
    def longest_window(self) -> int | None:
        """The last tokens that a token attends to in any layer; None if a layer attends to all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    def page_shape(self, kv_dtype: KvDtype) -> tuple[int, ...]:
        """[layers, keys and values, key-value heads, tokens, head size]

        In int8 the last two are bytes: the numbers, and then the scale of each token. So a range of heads stays
        contiguous, with its scales.
        """
        outer = self.num_layers, 2, self.num_kv_heads
        if kv_dtype == "int8":
            return *outer, BLOCK_SIZE * (self.head_dim + _SCALE_BYTES)
        return *outer, BLOCK_SIZE, self.head_dim

    def page_bytes(self, kv_dtype: KvDtype) -> int:
        """Bytes of one page of the KV pool."""
        return math.prod(self.page_shape(kv_dtype)) * (1 if kv_dtype == "int8" else DTYPE_BYTES[kv_dtype])


def load_config(model_dir: Path) -> ModelConfig:
    """Reads `config.json` of a checkpoint directory.

    Raises:
        CheckpointError: The file is missing or malformed, or the model is not supported.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a directory; give the directory of a Hugging Face checkpoint")
    path = model_dir / "config.json"
    if not path.exists():
        raise CheckpointError(f"{path} is missing; give the directory of a Hugging Face checkpoint")
    return _Reader(path, read_json(path)).model()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold one JSON object")
    return data


class _Reader:
    """Typed access to the fields of one config.json."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def model(self) -> ModelConfig:
        fields = self._fields
        model_type, family = self._family()
        if (activation := fields.get("hidden_act", "silu")) != "silu":
            raise self._error(f"hidden_act {activation!r} is not supported", "only silu is")
        hidden_size = self._int("hidden_size")
        num_layers = self._int("num_hidden_layers")
        if num_layers > _MOST_LAYERS:
            raise self._error(f"num_hidden_layers {num_layers} is over {_MOST_LAYERS}")
        num_heads = self._int("num_attention_heads")
        num_kv_heads = self._int("num_key_value_heads", family.num_kv_heads or num_heads, null=num_heads)
        if num_heads % num_kv_heads:
            raise self._error(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        derived = hidden_size // num_heads
        head_dim = self._int("head_dim", family.head_dim or derived, null=derived)
        if head_dim % 2:
            raise self._error(f"head_dim {head_dim} is odd", "rotary embedding needs an even one")
        max_position = self._int("max_position_embeddings", family.max_position_embeddings)
        rope = self._rope(family, max_position)
        # A file edited to switch YaRN on still has its old max_position_embeddings.
        extended = int(rope.original_max_position * rope.factor) if rope.kind == "yarn" else 0
        attention_bias = family.attention_bias and bool(fields.get("attention_bias", False))
        return ModelConfig(
            family=model_type,
            vocab_size=self._int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._int("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=self._float(fields, "rms_norm_eps", family.norm_eps),
            rope=rope,
            qkv_bias=family.always_qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family.mlp_bias and bool(fields.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
            windows=self._windows(family, num_layers),
            experts=None if family.experts is None else self._experts(family.experts, num_layers),
            max_model_len=max(max_position, extended),
            dtype=self._dtype(),
            scheme=self._scheme(),
        )

    def _family(self) -> tuple[str, _Family]:
        supported = ", ".join(family.architecture for family in _FAMILIES.values())
        architectures = self._list("architectures") or []
        by_architecture = {family.architecture: name for name, family in _FAMILIES.items()}
        model_type = self._fields.get("model_type") or next(
            (by_architecture[name] for name in architectures if name in by_architecture), None
        )
        family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None or (architectures and family.architecture not in architectures):
            named = ", ".join(architectures) or model_type or "none given"
            raise self._error(f"architecture {named} is not supported", f"supported are {supported}")
        return str(model_type), family

    def _windows(self, family: _Family, num_layers: int) -> tuple[int | None, ...]:
        window = self._fields.get("sliding_window", family.sliding_window)
        if "if used" in family.window and not self._fields.get("use_sliding_window", False):
            window = None
        slides = [family.window != "none"] * num_layers
        if family.window == "some layers if used":
            kinds = self._list("layer_types")
            if kinds is None:
                first = self._count("max_window_layers", 28)
                slides = [window is not None and layer >= first for layer in range(num_layers)]
            else:
                slides = self._listed_windows(kinds, num_layers, window)
        if window is None or not any(slides):
            return (None,) * num_layers
        window = self._positive("sliding_window", window)
        return tuple(window if slide else None for slide in slides)

    def _listed_windows(self, kinds: list[str], num_layers: int, window: Any) -> list[bool]:
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise self._error(f"layer_types contains {sorted(unknown)[0]!r}, which is not supported")
        if len(kinds) != num_layers:
            raise self._error(f"layer_types has {len(kinds)} entries for {num_layers} layers")
        if window is None and "sliding_attention" in kinds:
            raise self._error("layer_types contains 'sliding_attention', but no sliding window is in use")
        return [kind == "sliding_attention" for kind in kinds]

    def _experts(self, defaults: _ExpertFields, num_layers: int) -> ExpertsConfig | None:
        counts = {name: self._int(name) for name in ("num_experts", "num_local_experts") if name in self._fields}
        if len(set(counts.values())) > 1:
            raise self._error("num_experts and num_local_experts differ")
        count = next(iter(counts.values()), defaults.count)
        if count * num_layers > _MOST_EXPERTS:
            raise self._error(f"{count} experts in each of {num_layers} layers are over {_MOST_EXPERTS} in all")
        per_token = self._int("num_experts_per_tok", defaults.per_token)
        if per_token > count:
            raise self._error(f"num_experts_per_tok {per_token} is over the number of experts, {count}")
        layers = self._expert_layers(num_layers) if defaults.some_layers else tuple(range(num_layers))
        if not layers:
            return None
        return ExpertsConfig(
            count=count,
            per_token=per_token,
            width=self._int(defaults.width_field, defaults.width),
            normalize=defaults.always_normalize or bool(self._fields.get("norm_topk_prob", False)),
            layers=layers,
        )

    def _expert_layers(self, num_layers: int) -> tuple[int, ...]:
        step = self._int("decoder_sparse_step", 1)
        without = self._fields.get("mlp_only_layers") or []
        if not (isinstance(without, list) and all(type(layer) is int for layer in without)):
            raise self._error(f"mlp_only_layers must be a list of layers, not {without!r}")
        return tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in without)

    def _rope(self, family: _Family, max_position: int) -> RopeConfig:
        # transformers 5 writes everything into rope_parameters; older files have rope_theta and rope_scaling.
        fields = self._fields
        scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
            raise self._error("rope_parameters must be one set of values for all layers")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        theta = self._float(scaling, "rope_theta", self._float(fields, "rope_theta", family.theta))
        if theta <= 1:
            raise self._error(f"rope_theta must be over 1, not {theta}")
        partial = scaling.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise self._error(f"partial_rotary_factor {partial} is not supported")
        if kind == "default":
            return RopeConfig(theta=theta)
        if kind not in ("linear", "dynamic", "llama3", "yarn"):
            raise self._error(
                f"RoPE scaling {kind!r} is not supported", "supported are default, linear, dynamic, llama3 and yarn"
            )
        # The top-level field wins in transformers, too.
        name = "original_max_position_embeddings"
        original = self._positive(name, fields.get(name) or scaling.get(name) or max_position)
        factor = self._float(scaling, "factor", max_position / original if kind == "yarn" else None)
        if factor < 1:
            raise self._error(f"factor of RoPE scaling must be at least 1, not {factor}")
        if kind == "dynamic":
            # It scales by the length of a sequence that is over max_position_embeddings, the most that is served.
            return RopeConfig(theta=theta)
        if kind == "linear":
            return RopeConfig("linear", theta, factor)
        if kind == "llama3":
            low, high = self._float(scaling, "low_freq_factor"), self._float(scaling, "high_freq_factor")
            if low >= high:
                raise self._error(f"low_freq_factor {low} must be below high_freq_factor {high}")
            return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)
        fast, slow = self._float(scaling, "beta_fast", 32.0), self._float(scaling, "beta_slow", 1.0)
        if fast < slow:
            raise self._error(f"beta_fast {fast} must not be below beta_slow {slow}")
        return RopeConfig(
            "yarn",
            theta,
            factor,
            original,
            beta_fast=fast,
            beta_slow=slow,
            truncate=bool(scaling.get("truncate", True)),
            attention_factor=self._yarn_attention_factor(scaling, factor),
        )

    def _yarn_attention_factor(self, scaling: dict[str, Any], factor: float) -> float:
        default = _yarn_mscale(factor, 1.0)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            mscale, all_dim = self._float(scaling, "mscale"), self._float(scaling, "mscale_all_dim")
            default = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
        return self._float(scaling, "attention_factor", default)

    def _scheme(self) -> Scheme | None:
        fields = self._fields.get("quantization_config") or self._fields.get("compression_config")  # the older name
        if not fields:
            return None
        method = fields.get("quant_method") if isinstance(fields, dict) else None
        problem = f"the weights are quantised by {method or 'quantization_config'}"
        advice = f"what can be read are {READABLE}"
        if method != "compressed-tensors":
            raise self._error(problem, advice)
        try:
            return read_scheme(fields)
        except ValueError as error:
            raise self._error(f"{problem}: {error}", advice) from None

    def _dtype(self) -> Dtype | None:
        name = self._fields.get("dtype") or self._fields.get("torch_dtype")
        if name is None:
            return None
        name = str(name).removeprefix("torch.")
        for dtype in DTYPE_BYTES:
            if name == dtype:
                return dtype
        raise self._error(f"dtype {name} is not supported", f"supported are {', '.join(DTYPE_BYTES)}")

    def _list(self, name: str) -> list[str] | None:
        value = self._fields.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self._error(f"{name} must be a list of names, not {value!r}")
        return value

    def _int(self, name: str, default: int | None = None, *, null: int | None = None) -> int:
        value = self._fields.get(name, default)
        if value is None:
            value = null
        if value is None:
            raise self._error(f"{name} is missing")
        return self._positive(name, value)

    def _count(self, name: str, default: int) -> int:
        value = self._fields.get(name, default)
        return 0 if value == 0 and type(value) is int else self._positive(name, value)

    def _positive(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _TOO_LARGE:
            raise self._error(f"{name} must be a positive integer, not {value!r}")
        return value

    def _float(self, fields: dict[str, Any], name: str, default: float | None = None) -> float:
        value = fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise self._error(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _TOO_LARGE:
            raise self._error(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def _error(self, problem: str, advice: str = "") -> CheckpointError:
        return CheckpointError(f"{self._path}: {problem}" + (f"; {advice}" if advice else ""))


def _yarn_mscale(scale: float, mscale: float) -> float:
    """Factor by which YaRN scales queries and keys (https://arxiv.org/abs/2309.00071, section 3.4)."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
