"""GGUF files: their weights, configuration and tokenizer are those of the checkpoint that they were made of."""

import contextlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Types
from rich.console import Console
from safetensors.torch import save_file
from tokenizers import Tokenizer

from cpd.common.errors import CheckpointError, ConfigError, CPDError
from cpd.common.settings import ClusterSettings
from deploy.model import inspect_model, resolve_model
from deploy.up import _checked
from engine.execution.memory_plan import plan_memory
from engine.execution.runner import TorchRunner
from engine.model.checkpoint import open_checkpoint
from engine.model.config import load_config
from engine.model.gguf_file import read_gguf
from engine.ops.quantized import GroupFormat, QuantizedWeight, quantize
from router.text.text_files import load_text_files
from tests.checkpoints import BOS, CHAT_TEMPLATE, END_OF_TURN, EOS, oracle_logits
from tests.conftest import MakeCheckpoint
from tests.engine.execution.test_quantization import CPU, WHOLE_GROUPS, logits_of
from tests.engine.execution.test_runner import prompt_of
from tests.gguf_files import write_gguf

WHOLE_BLOCKS = {
    **WHOLE_GROUPS,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
}
K_MIX = {"attn_v": Types.Q6_K, "ffn_down": Types.Q6_K, " output.": Types.Q6_K, "token_embd": Types.Q6_K, "": Types.Q4_K}
KINDS = {
    "F32": ({"": Types.F32}, "bfloat16"),
    "BF16": ({"": Types.BF16}, "bfloat16"),
    "Q8_0": ({"": Types.Q8_0}, "bfloat16 with int8 weights"),
    "Q4_0": ({" output.": Types.Q8_0, "": Types.Q4_0}, "bfloat16 with int4 and int8 weights"),
    "Q4_1 and Q5_1": ({"attn_k": Types.Q5_1, "": Types.Q4_1}, "bfloat16 with int4 and int8 weights"),
    "Q4_K_M": (K_MIX, "bfloat16 with int4 and int8 weights"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.gguf_model._home", lambda: tmp_path / "cache")


def load(directory: Path, **settings: Any) -> TorchRunner:
    given = {"dtype": "auto", "device": "cpu", "kv_bytes": 32 << 20, "max_model_len": 0, **settings}
    return TorchRunner(directory, **given)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(
            (family, kind)
            for family in ("llama3", "qwen2", "qwen3", "mixtral", "qwen3_moe")
            for kind in ("F32", "Q4_K_M")
        ),
        ("llama3", "Q8_0"),
        ("qwen2", "Q4_1 and Q5_1"),
        ("qwen3", "BF16"),
        ("mixtral", "Q4_0"),
        ("qwen3_moe", "Q8_0"),
    ],
)
def test_logits_are_those_of_the_dequantised_weights(
    checkpoint: MakeCheckpoint, tmp_path: Path, family: str, kind: str
) -> None:
    original, (types, dtype) = checkpoint(family, **WHOLE_BLOCKS), KINDS[kind]
    tensors = write_gguf(original, tmp_path / "m.gguf", types)
    reference = Path(shutil.copytree(original, tmp_path / "reference"))
    (reference / "model.safetensors").unlink()
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    tokens = prompt_of(60)
    expected = oracle_logits(reference, tokens)
    directory = resolve_model(str(tmp_path / "m.gguf"))
    assert load(directory).dtype == dtype
    error = (logits_of(load(directory, dtype="float32"), tokens) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < (1e-5 if kind in ("F32", "BF16") else 0.1)


@pytest.mark.parametrize(
    ("kind", "bits", "tolerance"),
    [
        ("Q8_0", 8, 0.0),
        ("Q4_0", 4, 0.0),
        ("Q4_1", 4, 0.0),
        ("Q4_K", 4, 2**-10),
        ("Q5_0", 8, 1 / 200),
        ("Q6_K", 8, 1 / 200),
    ],
)
def test_weights_are_those_that_the_package_dequantises(
    checkpoint: MakeCheckpoint, tmp_path: Path, kind: str, bits: int, tolerance: float
) -> None:
    """`tolerance`: largest error relative to the largest weight."""
    tensors = write_gguf(checkpoint("llama3", **WHOLE_BLOCKS), tmp_path / "m.gguf", {"": Types[kind]})
    directory = resolve_model(str(tmp_path / "m.gguf"))
    with open_checkpoint(directory, load_config(directory)) as opened:
        for part in ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"):
            weight, expected = opened.read_weight([f"{part}.weight"], torch.float32, CPU), tensors[f"{part}.weight"]
            assert isinstance(weight, QuantizedWeight)
            assert GroupFormat(weight.bits, weight.minima is not None) == opened.group_format([f"{part}.weight"])
            assert weight.bits == bits
            assert (weight.dequantize() - expected).abs().max() <= tolerance * expected.abs().max()


def test_weights_are_quantised_again_a_few_rows_at_a_time(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {"attn_k": Types.Q5_0, "attn_v": Types.Q6_K, "": Types.Q8_0}
    write_gguf(checkpoint("llama3", **WHOLE_BLOCKS), tmp_path / "m.gguf", types)
    directory = resolve_model(str(tmp_path / "m.gguf"))
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    elements: list[int] = []

    def watched(weight: torch.Tensor, bits: int) -> QuantizedWeight:
        elements.append(weight.numel())
        return quantize(weight, bits)

    with open_checkpoint(directory, load_config(directory)) as opened:
        whole = opened.read(names, torch.float32, CPU)
        monkeypatch.setattr("engine.model.gguf_weights._AT_ONCE", 3 * whole.shape[1])
        monkeypatch.setattr("engine.model.gguf_weights.quantize", watched)
        assert torch.equal(opened.read(names, torch.float32, CPU), whole)
        weight, expected = opened.read_weight(names, torch.float32, CPU), quantize(whole, 8)
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.values, expected.values)
    assert torch.equal(weight.scales, expected.scales)
    assert max(elements) == 3 * whole.shape[1]
    assert sum(elements) == whole.numel()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K_M"])
def test_planned_memory_is_that_of_the_packed_weights(checkpoint: MakeCheckpoint, tmp_path: Path, kind: str) -> None:
    write_gguf(checkpoint("llama3", **WHOLE_BLOCKS, vocab_size=512), tmp_path / "m.gguf", KINDS[kind][0])
    directory = resolve_model(str(tmp_path / "m.gguf"))
    config, weights = load_config(directory), load(directory)._model.weights()
    *packed, rope = (weight.nbytes for weight in weights)
    assert rope == config.max_model_len * config.head_dim * 4
    with open_checkpoint(directory, config) as opened:
        assert plan_memory(config, opened, dtype="auto", max_model_len=0).weight_bytes == sum(packed)


def test_biases_are_read(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    original = checkpoint("llama3", attention_bias=True, mlp_bias=True)
    tensors = write_gguf(original, tmp_path / "m.gguf", {"": Types.F32})
    directory = resolve_model(str(tmp_path / "m.gguf"))
    config = load_config(directory)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    with open_checkpoint(directory, config) as opened:
        assert opened.unused({}) == []
        for name, expected in tensors.items():
            assert torch.equal(opened.read([name], torch.float32, CPU), expected)


@pytest.mark.parametrize("family", ["llama2", "llama3", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_the_configuration_is_that_of_the_checkpoint(checkpoint: MakeCheckpoint, tmp_path: Path, family: str) -> None:
    original = checkpoint(family)
    write_gguf(original, tmp_path / "m.gguf", {"": Types.F32})
    expected, found = load_config(original), load_config(resolve_model(str(tmp_path / "m.gguf")))
    differing = {name for name in expected.__slots__ if getattr(expected, name) != getattr(found, name)}
    assert differing <= {"dtype", "family"}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantising_at_start_gives_the_numbers_of_the_package(
    checkpoint: MakeCheckpoint, tmp_path: Path, kind: str
) -> None:
    original = checkpoint("qwen3", **WHOLE_GROUPS)
    write_gguf(original, tmp_path / "m.gguf", {" output.": Types.Q8_0, "": Types[kind]})
    ours = load(original, dtype="float32", quantization="int8" if kind == "Q8_0" else "int4")
    theirs = load(resolve_model(str(tmp_path / "m.gguf")), dtype="float32")
    theirs._model._embedding = ours._model._embedding  # a lookup in the file's is quantised, too
    assert torch.equal(logits_of(ours, prompt_of(40)), logits_of(theirs, prompt_of(40)))


def test_texts_have_the_tokens_and_the_template_of_the_checkpoint(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    original = checkpoint("qwen3")
    write_gguf(original, tmp_path / "m.gguf", {"": Types.F32})
    directory = resolve_model(str(tmp_path / "m.gguf"))
    ours, theirs = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (directory, original))
    for text in ("The copper door, 4817!", f"{BOS}Straße  naïve\n\n🙂 {EOS}", " leading and trailing ", ""):
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    files = load_text_files(directory)
    assert files.name == "m"
    assert files.eos_ids == (ours.token_to_id(EOS),)
    assert files.template is not None
    assert json.loads((directory / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def test_a_bos_token_begins_texts_if_the_file_says_so(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    write_gguf(checkpoint("qwen3"), tmp_path / "m.gguf", {"": Types.F32}, **{"tokenizer.ggml.add_bos_token": True})
    tokenizer = Tokenizer.from_file(str(resolve_model(str(tmp_path / "m.gguf")) / "tokenizer.json"))
    assert tokenizer.encode("a").tokens == [BOS, "a"]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def test_texts_begin_with_bos_in_files_of_llama_3_that_do_not_say(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for fields, tokens in (
        ({"pre": "llama-bpe"}, [BOS, "a"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["a"]),
        ({"pre": "qwen2"}, ["a"]),
    ):
        written = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
        write_gguf(checkpoint("llama3"), tmp_path / "m.gguf", {"": Types.F32}, **written)
        tokenizer = Tokenizer.from_file(str(resolve_model(str(tmp_path / "m.gguf")) / "tokenizer.json"))
        assert tokenizer.encode("a").tokens == tokens


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        ({BOS: "<|endoftext|>", EOS: "<|im_end|>"}, ["<|im_end|>", "<|endoftext|>"]),
        (
            {BOS: "<|end_of_text|>", EOS: "<|eot_id|>", END_OF_TURN: "<|eom_id|>"},
            ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
        ),
        ({}, [EOS]),
    ],
)
def test_outputs_end_at_all_control_tokens_that_end_one(
    checkpoint: MakeCheckpoint, tmp_path: Path, texts: dict[str, str], ends: list[str]
) -> None:
    original = checkpoint("qwen3")
    write_gguf(original, tmp_path / "first.gguf", {"": Types.F32})
    fields = read_gguf(tmp_path / "first.gguf").metadata
    tokens = [texts.get(token, token) for token in fields["tokenizer.ggml.tokens"]]
    tokens[fields["tokenizer.ggml.token_type"].index(gguf.TokenType.UNUSED)] = "<|end|>" if texts else "<|eot_id|>"
    write_gguf(original, tmp_path / "m.gguf", {"": Types.F32}, **{"tokenizer.ggml.tokens": tokens})
    found = load_text_files(resolve_model(str(tmp_path / "m.gguf"))).eos_ids
    assert [tokens[number] for number in found] == ends


def test_pieces_of_sentences_are_merged_by_their_scores(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc", "ab", "bc", "▁ab"]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -13.0, -2.0, -1.0, -3.0]  # bc is merged before ab
    types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256, *[1] * 7]
    original = checkpoint("llama2", vocab_size=len(pieces))
    fields = {
        "model": "llama",
        "pre": None,
        "tokens": pieces,
        "scores": scores,
        "token_type": [int(kind) for kind in types],
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    write_gguf(
        original,
        tmp_path / "m.gguf",
        {"": Types.F32},
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    )
    tokenizer = Tokenizer.from_file(str(resolve_model(str(tmp_path / "m.gguf")) / "tokenizer.json"))
    assert tokenizer.encode("abc ab").tokens == ["<s>", "▁", "a", "bc", "▁ab"]
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc é ab").ids) == "abc é ab"


def test_a_changed_file_gets_another_directory(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(checkpoint("qwen3"), path, {"": Types.F32})
    first = resolve_model(str(path))
    assert resolve_model(str(path)) == first
    write_gguf(checkpoint("qwen2"), path, {"": Types.F32})
    assert resolve_model(str(path)) != first


def test_a_file_in_the_cache_of_hugging_face_has_the_name_of_its_link(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blobs").mkdir()
    write_gguf(checkpoint("qwen3"), tmp_path / "blobs" / "9465e63a", {"": Types.F32})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "Qwen3-Q8_0.gguf").symlink_to("../blobs/9465e63a")
    monkeypatch.chdir(tmp_path)
    directory = resolve_model("snapshot/Qwen3-Q8_0.gguf")
    assert load_text_files(directory).name == "Qwen3-Q8_0"
    assert (directory / "model.gguf").resolve() == tmp_path / "blobs" / "9465e63a"


def test_machines_of_a_ray_cluster_are_given_the_link_in_that_cache(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    write_gguf(checkpoint("qwen3"), tmp_path / "9465e63a", {"": Types.F32})
    link = tmp_path / "Qwen3-Q8_0.gguf"
    link.symlink_to("9465e63a")
    settings = ClusterSettings.load({"model": str(link), "ray_address": "10.0.0.5:6379", "device": "cpu"})
    checked = _checked(settings, Console(quiet=True))
    assert (checked.model, checked.served_model_name) == (str(link), "Qwen3-Q8_0")


def test_a_directory_of_files_is_refused_with_their_names(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for name in ("a-Q8_0.gguf", "a-Q4_K_M.gguf"):
        write_gguf(checkpoint("qwen3"), tmp_path / name, {"": Types.F32})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"give the path of one of them: a-Q4_K_M\.gguf, a-Q8_0\.gguf$"):
        resolve_model(str(tmp_path))


def test_quantised_files_are_not_quantised_again(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    write_gguf(checkpoint("qwen3", **WHOLE_GROUPS), tmp_path / "m.gguf", {"": Types.Q8_0})
    with pytest.raises(ConfigError, match=r"quantised already .* use --quantization none"):
        load(resolve_model(str(tmp_path / "m.gguf")), quantization="int4")


@pytest.mark.parametrize(
    ("kind", "offset"),
    [("Q8_0", 34), ("Q4_1", 2), ("Q4_K", 2), ("Q6_K", 208)],  # the last ones' minima, and what is quantised again
)
def test_a_scale_that_is_not_finite_is_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path, kind: str, offset: int
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(checkpoint("qwen3", **WHOLE_BLOCKS), path, {"": Types[kind]})
    begin = read_gguf(path).tensors["blk.1.ffn_down.weight"].begin
    with path.open("r+b") as file:
        file.seek(begin + offset)
        file.write(b"\x00\x7e")  # NaN
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight .* not finite"):
        load(resolve_model(str(path)))


# --- Files that are refused


@pytest.fixture
def file(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    write_gguf(checkpoint("qwen3"), tmp_path / "m.gguf", {"": Types.F32})
    return tmp_path / "m.gguf"


def refusal(path: Path) -> str:
    with pytest.raises(CPDError) as caught:
        inspect_model(resolve_model(str(path)), ClusterSettings.load({"device": "cpu"}), 1, 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kept", [0, 3, 12, 23, 100, 5000])
def test_a_truncated_header_is_refused(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    assert "can't be read" in (said := refusal(file)) or "no GGUF file" in said or "truncated or damaged" in said


def test_truncated_weights_are_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])
    assert "ends after the file does; download it again" in refusal(file)


@pytest.mark.parametrize("offset", [8, 16])
def test_counts_that_do_not_fit_the_file_are_refused(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    struct.pack_into("<Q", content, offset, 1 << 60)
    file.write_bytes(content)
    assert f"it says that {1 << 60} entries follow" in refusal(file)


def test_every_damaged_byte_of_the_header_is_refused_or_harmless(file: Path) -> None:
    content = file.read_bytes()
    for at in range(0, 1500, 23):
        file.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        with contextlib.suppress(CheckpointError):
            directory = resolve_model(str(file))
            with open_checkpoint(directory, load_config(directory)):
                pass


def test_other_architectures_tokenizers_and_types_are_named(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path, original = tmp_path / "m.gguf", checkpoint("qwen3")
    for name, value, sentence in (
        ("general.architecture", "mamba", "architecture mamba is not supported; supported are llama, qwen2"),
        ("tokenizer.ggml.model", "bert", "tokenizer bert is not supported; supported are gpt2, llama"),
        ("tokenizer.ggml.pre", "tekken", "cuts texts as tekken, which is not supported; supported are default"),
        ("split.count", 3, "is one of several files"),
        ("ARCH.block_count", None, "the field block_count is missing"),
        ("ARCH.block_count", 9, "is missing"),
        ("ARCH.rope.dimension_count", 16, "partial_rotary_factor 0.5 is not supported"),
        ("tokenizer.ggml.eot_token_id", 1 << 30, "eot_token_id is 1073741824, and there are"),
    ):
        write_gguf(original, path, {"": Types.F32}, **{name: value})
        assert sentence in refusal(path)
    write_gguf(original, path, {"": Types.F32}, **{"split.count": 3, "general.architecture": "None"})
    assert "is one of several files; join them" in refusal(path)
    content = bytearray(path.read_bytes())
    at = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    struct.pack_into("<I", content, at, 23)  # IQ4_XS
    path.write_bytes(content)
    assert "output_norm.weight has type 23 of GGML; what can be read are F32, F16, BF16, Q8_0" in refusal(path)


def test_experts_that_do_not_fit_their_number_are_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(checkpoint("qwen3_moe"), path, {"": Types.F32}, **{"ARCH.expert_count": 7})
    assert "which is not that of 7 experts; download it again" in refusal(path)


def test_other_divisors_of_frequencies_are_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(checkpoint("llama3"), path, {"": Types.F32})
    begin = read_gguf(path).tensors["rope_freqs.weight"].begin
    content = bytearray(path.read_bytes())
    struct.pack_into("<f", content, begin, 1.5)
    path.write_bytes(content)
    assert "scales single frequencies of RoPE in another way" in refusal(path)


def test_scaling_of_frequencies_is_that_of_the_file(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    fields = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 512,
        "yarn_beta_fast": 24.0,
        "yarn_beta_slow": 2.0,
    }
    scaling = {f"ARCH.rope.scaling.{name}": value for name, value in fields.items()}
    write_gguf(checkpoint("qwen2"), tmp_path / "yarn.gguf", {"": Types.F32}, **scaling)
    found = load_config(resolve_model(str(tmp_path / "yarn.gguf"))).rope
    assert (found.kind, found.factor, found.original_max_position) == ("yarn", 4.0, 512)
    assert (found.beta_fast, found.beta_slow) == (24.0, 2.0)
    scaling["ARCH.rope.scaling.attn_factor"] = 1.5
    write_gguf(checkpoint("qwen2"), tmp_path / "other.gguf", {"": Types.F32}, **scaling)
    assert "rope.scaling.attn_factor is 1.5, and only 1 is supported" in refusal(tmp_path / "other.gguf")


def test_older_files_name_only_the_factor_of_linear_scaling(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for factor, expected in ((4.0, ("linear", 4.0)), (1.0, ("default", 1.0))):
        write_gguf(checkpoint("llama2"), tmp_path / "m.gguf", {"": Types.F32}, **{"ARCH.rope.scale_linear": factor})
        found = load_config(resolve_model(str(tmp_path / "m.gguf"))).rope
        assert (found.kind, found.factor) == expected


def test_rows_of_a_file_have_the_order_of_the_checkpoint(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    original = checkpoint("llama2")
    tensors = write_gguf(original, tmp_path / "m.gguf", {"": Types.F32})
    directory = resolve_model(str(tmp_path / "m.gguf"))
    with open_checkpoint(directory, load_config(directory)) as opened:
        for name, expected in tensors.items():
            assert torch.equal(opened.read([name], torch.float32, CPU), expected)
        assert opened.unused({}) == []
