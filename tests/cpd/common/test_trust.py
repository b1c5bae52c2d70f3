from cpd.common.trust import ClusterSecret


def test_a_code_is_only_good_for_its_label_its_parts_and_its_secret() -> None:
    secret = ClusterSecret("secret")
    code = secret.sign("label", b"one", b"two")
    assert secret.verify(code, "label", b"one", b"two")
    assert not secret.verify(code, "another", b"one", b"two")
    assert not secret.verify(code, "label", b"onet", b"wo")
    assert not secret.verify(code, "label", b"one")
    assert not secret.verify(b"", "label", b"one", b"two")
    assert not ClusterSecret("guess").verify(code, "label", b"one", b"two")


def test_an_empty_secret_signs_nothing_and_trusts_everyone() -> None:
    secret = ClusterSecret("")
    assert (secret.sign("label", b"one"), secret.admin_key) == (b"", "")
    assert secret.verify(b"anything", "label", b"one")


def test_neither_the_admin_key_nor_a_log_line_shows_the_secret() -> None:
    secret = ClusterSecret("hidden")
    assert "hidden" not in secret.admin_key
    assert "hidden" not in repr(secret)
    assert secret.admin_key == ClusterSecret("hidden").admin_key != ClusterSecret("other").admin_key
