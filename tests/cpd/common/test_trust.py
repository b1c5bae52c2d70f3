import os
from pathlib import Path

import pytest

from cpd.common.errors import ConfigError
from cpd.common.settings import WorkerSettings
from cpd.common.trust import ClusterSecret, cluster_secret, is_loopback, read_secret


def test_a_code_is_only_good_for_its_label_its_parts_and_its_secret() -> None:
    secret = ClusterSecret("secret")
    code = secret.sign("label", b"one", b"two")
    assert secret.verify(code, "label", b"one", b"two")
    assert not secret.verify(code, "another", b"one", b"two")
    assert not secret.verify(code, "label", b"onet", b"wo")
    assert not secret.verify(code, "label", b"one")
    assert not secret.verify(b"", "label", b"one", b"two")
    assert not ClusterSecret("guess").verify(code, "label", b"one", b"two")


def test_a_signed_text_is_read_with_the_same_label_parts_and_secret_only() -> None:
    secret = ClusterSecret("a long and secret text")
    value = secret.signed("plan", b"do this", b"cluster")
    assert secret.verified("plan", value, b"cluster") == b"do this"
    assert secret.verified("plan", value, b"other") is None
    assert secret.verified("scale", value, b"cluster") is None
    assert secret.verified("plan", value.replace(b"this", b"that"), b"cluster") is None
    assert secret.verified("plan", b"no code", b"cluster") is None
    assert ClusterSecret("another secret text").verified("plan", value, b"cluster") is None


def test_an_empty_secret_signs_nothing_and_trusts_everyone() -> None:
    secret = ClusterSecret("")
    assert (secret.sign("label", b"one"), secret.admin_key) == (b"", "")
    assert secret.verify(b"anything", "label", b"one")


def test_neither_the_admin_key_nor_a_log_line_shows_the_secret() -> None:
    secret = ClusterSecret("hidden")
    assert "hidden" not in secret.admin_key
    assert "hidden" not in repr(secret)
    assert secret.admin_key == ClusterSecret("hidden").admin_key != ClusterSecret("other").admin_key


def _file(directory: Path, secret: str, mode: int = 0o600) -> Path:
    file = directory / "secret"
    file.touch(mode)
    file.write_text(secret)
    return file


def test_a_secret_comes_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = read_secret(_file(tmp_path, "long enough a secret\n"))
    assert secret.admin_key == ClusterSecret("long enough a secret").admin_key
    assert caplog.text == ""


def test_a_file_that_others_can_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_secret(_file(tmp_path, "long enough a secret", 0o644))
    assert f"chmod 600 {tmp_path}/secret" in caplog.text


def test_a_file_of_root_that_only_the_own_group_can_read_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So systemd and Kubernetes pass secrets."""
    file = _file(tmp_path, "long enough a secret", 0o440)
    read_secret(file)
    assert "chmod 600" in caplog.text  # its owner could say who reads it
    caplog.clear()
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    read_secret(file)
    assert caplog.text == ""


@pytest.mark.parametrize("secret", ["", "\n", "(short)"])
def test_a_secret_that_can_be_guessed_is_refused_and_not_shown(tmp_path: Path, secret: str) -> None:
    with pytest.raises(ConfigError, match="shorter than 16 characters and could be guessed; write one") as refused:
        read_secret(_file(tmp_path, secret))
    assert "(short)" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere can't be read: No such file"):
        read_secret(tmp_path / "nowhere")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_on_loopback_a_process_needs_no_secret(host: str) -> None:
    assert is_loopback(host)
    assert not cluster_secret(WorkerSettings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.7"])
def test_where_others_reach_it_a_process_needs_a_secret(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="its cluster needs a secret: write one to a file"):
        cluster_secret(WorkerSettings(host=host))
    assert cluster_secret(WorkerSettings(host=host, secret_file=_file(tmp_path, "long enough a secret")))
