from pathlib import Path

import pytest

from cpd.common.errors import ConfigError
from cpd.common.settings import ClusterSettings, RouterSettings, WorkerSettings


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text("token-budget: 64\nmax_num_seqs: 8\nkv-memory: 2GiB\napi-key: [one, two]\n")
    return file


def test_flag_wins_over_environment_over_file_over_default(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPD_MAX_NUM_SEQS", "16")
    monkeypatch.setenv("CPD_TOKEN_BUDGET", "128")
    settings = ClusterSettings.load({"token_budget": 256}, yaml_file)
    assert settings.token_budget == 256
    assert settings.max_num_seqs == 16
    assert settings.kv_memory == 2 << 30
    assert settings.port == 8000
    assert settings.api_key == ["one", "two"]


def test_reloaded_settings_have_the_same_flags_and_the_file_as_it_is_now(
    yaml_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(yaml_file.parent)
    settings = ClusterSettings.load({"token_budget": 256}, Path(yaml_file.name)).model_copy(update={"model": "m"})
    monkeypatch.chdir("/")
    yaml_file.write_text("token-budget: 1\nmax_num_seqs: 9\n")
    again = settings.reload().reload()
    assert (again.token_budget, again.max_num_seqs, again.kv_memory) == (256, 9, None)
    yaml_file.write_text("colour: red\n")
    with pytest.raises(ConfigError, match="no setting 'colour'"):
        settings.reload()


def test_several_keys_come_from_flags_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RouterSettings.load({"api_key": ["one", "two,three"]}).api_key == ["one", "two", "three"]
    monkeypatch.setenv("CPD_API_KEY", "four,five")
    assert RouterSettings.load({}).api_key == ["four", "five"]


@pytest.mark.parametrize("given", ["", " ", ",", "\n", [""], ["one", ""], ["one", ",\r\n"]])
def test_an_empty_key_is_refused_and_does_not_open_the_endpoint(given: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^api-key: a key is empty") as caught:
        RouterSettings.load({"api_key": given})
    assert "one" not in str(caught.value)


def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPD_API_KEY", "")
    with pytest.raises(ConfigError, match=r"^api-key: a key is empty"):
        ClusterSettings.load({})


def test_no_keys_are_a_setting_left_out_or_an_empty_list(tmp_path: Path) -> None:
    file = tmp_path / "cpd.yaml"
    file.write_text("api-key: []\n")
    assert RouterSettings.load({}).api_key == RouterSettings.load({}, file).api_key == []


def test_origins_are_schemes_and_hosts() -> None:
    origins = ["https://app.example", "http://localhost:3000", "http://[::1]:8080", "*"]
    assert RouterSettings.load({"allowed_origins": ",".join(origins)}).allowed_origins == origins


def test_several_hosts_come_from_flags_the_environment_or_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("allowed-hosts: [llm.example, '[::1]']")
    assert RouterSettings.load({}, tmp_path / "c.yaml").allowed_hosts == ["llm.example", "[::1]"]
    monkeypatch.setenv("CPD_ALLOWED_HOSTS", "llm.example, 10.0.0.5")
    assert RouterSettings.load({}).allowed_hosts == ["llm.example", "10.0.0.5"]
    assert RouterSettings.load({"allowed_hosts": ["a", "b,*"]}).allowed_hosts == ["a", "b", "*"]


@pytest.mark.parametrize(
    ("written", "host"),
    [
        ("::0", "::"),
        ("[0:0:0:0:0:0:0:0]", "::"),
        ("FE80::1%eth0", "fe80::1%eth0"),
        ("0.0.0.0", "0.0.0.0"),
        ("Node-1", "Node-1"),
    ],
)
def test_an_address_has_one_form(written: str, host: str) -> None:
    settings = WorkerSettings.load({"host": written, "advertise_host": written})
    assert (settings.host, settings.advertise_host) == (host, host)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "http"}, "port: .*integer.*'http'"),
        ({"port": "70000"}, "port: .*65535"),
        ({"dtype": "int4"}, "dtype: .*float32"),
        ({"kv_memory": "plenty"}, "kv-memory: "),
        ({"host_kv_memory": "much"}, "host-kv-memory: "),
        ({"token_budget": "-1"}, "token-budget: .*0"),
        ({"lease_s": "0"}, "lease-s: "),
        ({"slo_ttft": "inf"}, "slo-ttft: "),
        ({"slo_itl": "nan"}, "slo-itl: "),
        ({"long_prefill_tokens": "5000000000"}, "long-prefill-tokens"),
        ({"long_prefill_tokens": "many"}, "^long-prefill-tokens: .*integer.* or: .*'auto' .*'many'"),
        ({"allowed_hosts": "https://llm.example"}, "allowed-hosts: .* without scheme and port.*https://llm.example"),
        ({"allowed_hosts": "llm.example,localhost:8000"}, "allowed-hosts: .*localhost:8000"),
        ({"allowed_hosts": "*.llm.example"}, "allowed-hosts: "),
        ({"allowed_hosts": "::1"}, "allowed-hosts: "),
        ({"allowed_origins": "app.example"}, "allowed-origins: .*https://app.example.*app.example"),
        ({"allowed_origins": "https://app.example/"}, "allowed-origins: .*without path"),
        ({"allowed_origins": "https://*.app.example"}, "allowed-origins: "),
        ({"store_responses": "-1"}, "store-responses: "),
        ({"no_such": "1"}, "there is no setting 'no-such'$"),
        ({"prefil": "1"}, "there is no setting 'prefil'; did you mean 'prefill'"),
    ],
)
def test_wrong_values_are_named_in_one_sentence(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ClusterSettings.load(flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n- b\n", "one mapping"),
        ("no-such: 1\n", "no setting 'no-such'"),
        ("port: http\n", "port: "),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        ClusterSettings.load({}, file)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes("port: 1\nserved-model-name: café\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml is not UTF-8 in line 2"):
        ClusterSettings.load({}, file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        ClusterSettings.load({}, tmp_path / "missing.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("")
    assert WorkerSettings.load({}, file).model_dump() == WorkerSettings.load({}).model_dump()
