from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from cpd.cli import serve
from cpd.cli.main import app
from cpd.cli.serve import translated
from cpd.common.errors import ConfigError
from cpd.common.settings import ClusterSettings

ONE_WORKER = ["--model", "m", "--prefill", "0", "--combined", "1"]


@pytest.mark.parametrize(
    ("vllm", "ours"),
    [
        ("", []),
        ("--port 8001 --max-model-len=4096 --dtype bfloat16", "--port 8001 --max-model-len 4096 --dtype bfloat16"),
        ("--max_model_len 4096", "--max-model-len 4096"),
        ("--gpu-memory-utilization 0.8 --max-num-batched-tokens=512", "--gpu-memory 0.8 --token-budget 512"),
        ("-tp 1 -dp 2 -asc=4", "--combined 2 --routers 4"),
        ("--enable-prefix-caching --trust-remote-code --host 0.0.0.0", "--host 0.0.0.0"),
        ("--generation-config vllm --seed 0", "--sampling-defaults openai"),
        ("--slo-itl 20 --host-kv-memory 8GiB", "--slo-itl 20 --host-kv-memory 8GiB"),
        (
            "--enable-auto-tool-choice --tool-call-parser llama4_pythonic --reasoning-parser=qwen3",
            "--tool-call-parser pythonic --reasoning-parser think",
        ),
        ("--tool_call_parser hermes --reasoning-parser none", "--tool-call-parser hermes --reasoning-parser none"),
        ("--served-model-name a=b", "--served-model-name a=b"),
        ('--allowed-origins ["https://a.example","*"]', "--allowed-origins https://a.example,*"),
        ('--allowed-origins * --allowed-methods ["*"] --allow-credentials', "--allowed-origins *"),
        ("--quantization gguf", "--quantization none"),
        ("-q int8", "--quantization int8"),
    ],
)
def test_flags_of_vllm_become_those_of_cpd_up(vllm: str, ours: str | Sequence[str]) -> None:
    assert translated("m", vllm.split()) == [*ONE_WORKER, *(ours.split() if isinstance(ours, str) else ours)]


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        ("-tp 2", "-tp 2 of vLLM is not supported; it may be 1"),
        ("--tensor_parallel_size=8", "--tensor_parallel_size 8 of vLLM is not supported"),
        ("--generation-config folder", "it may be auto or vllm"),
        ("--chat-template x.jinja", "the model's own template is used"),
        ("--seed", "may be 0"),
        ('--allowed-headers ["x-mine"]', "allowed-headers"),
    ],
)
def test_what_would_change_the_result_is_refused(vllm: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translated("m", vllm.split())


def test_every_flag_that_is_translated_to_exists() -> None:
    flags = {"--" + name.replace("_", "-") for name in ClusterSettings.model_fields}
    targets = {
        *serve.RENAMED.values(),
        *serve.OTHER_NAMES,
        *serve.LISTS,
        "--sampling-defaults",
        *(part for part in ONE_WORKER if part.startswith("--")),
    }
    assert targets <= flags
    assert not flags & {*serve.RENAMED, *serve.WITHOUT_EFFECT, *serve.ONE_VALUE, *serve.MISSING}
    assert set(serve.SHORT.values()) <= {*serve.RENAMED, *serve.ONE_VALUE, *serve.OTHER_NAMES, *serve.MISSING}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["serve"], 2, "Missing argument 'MODEL'"),
        (["serve", "/nowhere", "--enable-lora"], 1, "error: --enable-lora of vLLM: adapters are not supported"),
        (["serve", "/nowhere", "--no-such-flag"], 2, "No such option: --no-such-flag"),
        (["serve", "/nowhere", "--port", "x"], 2, "Invalid value for '--port'"),
    ],
)
def test_wrong_input_is_one_sentence(arguments: list[str], code: int, message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code
    assert message in result.output
