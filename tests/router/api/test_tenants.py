from pathlib import Path

import pytest

from cpd.common.errors import ConfigError
from cpd.common.trust import ClusterSecret
from router.api.tenants import KeyEntry, Keys, Tenant, credentials, read_keys
from router.errors import ApiError


def test_without_keys_everyone_is_the_same_tenant() -> None:
    assert Keys([]).tenant(b"") == Keys([]).tenant(b"Bearer x") == Tenant()


def test_every_key_is_a_tenant_of_its_own() -> None:
    keys = Keys(["one", "two"])
    one, two = keys.tenant(b"Bearer one"), keys.tenant(b"bearer  two ")
    assert one.name != two.name
    assert one.salt != two.salt
    assert Keys(["one"]).tenant(b"Bearer one") == one


def test_a_key_may_be_in_either_header() -> None:
    assert credentials({b"x-api-key": b"one"}) == b"Bearer one"
    assert credentials({b"authorization": b"Bearer one", b"x-api-key": b"two"}) == b"Bearer one"
    assert credentials({}) == b""


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer "])
def test_the_admin_key_is_an_operators_with_and_without_other_keys(scheme: str) -> None:
    secret = ClusterSecret("token")
    for keys in (Keys([], secret=secret), Keys(["one"], secret=secret)):
        keys.check_operator(f"{scheme}{secret.admin_key}".encode())
        for wrong in ("", "Basic " + secret.admin_key, scheme, scheme + "two"):
            with pytest.raises(ApiError):
                keys.check_operator(wrong.encode())


def test_a_tenants_name_and_salt_do_not_reveal_the_key() -> None:
    tenant = Keys(["one"]).tenant(b"Bearer one")
    assert "one" not in tenant.name
    assert b"one" not in tenant.salt


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer ", b"one", b"Basic one", b"Bearer on", b"Bearer one\xff"])
def test_a_missing_or_wrong_key_is_refused(header: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        Keys(["one", "two"]).tenant(header)
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")


class TestKeyFile:
    def _read(self, directory: Path, text: str) -> list[KeyEntry]:
        (directory / "keys.yaml").write_text(text)
        return read_keys(directory / "keys.yaml")

    def test_its_keys_have_its_permissions(self, tmp_path: Path) -> None:
        entries = self._read(tmp_path, "[{key: one}, {key: two, admin: true, min_priority: -7}]")
        secret = ClusterSecret("token")
        keys = Keys(["three"], entries, secret)
        allowed = [keys.tenant(f"Bearer {key}".encode()) for key in ("one", "two", "three", secret.admin_key)]
        assert [(tenant.admin, tenant.min_priority) for tenant in allowed] == [
            (False, 0),
            (True, -7),
            (True, -100),
            (True, -100),
        ]
        assert len({tenant.salt for tenant in allowed}) == 4

    def test_a_key_may_be_limited_to_some_models(self, tmp_path: Path) -> None:
        keys = Keys([], self._read(tmp_path, "[{key: one, models: [a, b]}, {key: all}]"))
        one, everything = keys.tenant(b"Bearer one"), keys.tenant(b"Bearer all")
        assert (one.may_use(frozenset({"b", "alias"})), one.may_use(frozenset({"c"}))) == (True, False)
        assert everything.may_use(frozenset({"c"}))

    def test_a_request_without_a_priority_has_the_nearest_that_is_allowed(self) -> None:
        for least, usual in ((-100, 0), (0, 0), (7, 7)):
            tenant = Tenant(min_priority=least)
            assert (tenant.priority(None), tenant.priority(9)) == (usual, 9)

    def test_a_key_for_an_unknown_model_is_refused_with_those_that_there_are(self, tmp_path: Path) -> None:
        (tmp_path / "keys.yaml").write_text("[{key: one, models: [a, x]}]")
        assert read_keys(tmp_path / "keys.yaml", ["a", "x"])
        with pytest.raises(ConfigError, match="for the model 'x', and there is none of that name; there are: a, b"):
            read_keys(tmp_path / "keys.yaml", ["a", "b"])

    def test_keys_of_one_name_are_one_tenant(self, tmp_path: Path) -> None:
        old, new, other = "{key: old, name: a}", "{key: new, name: a}", "{key: other, name: b}"
        before = Keys([], self._read(tmp_path, f"[{old}, {other}]"), ClusterSecret("secret"))
        after = Keys([], self._read(tmp_path, f"[{new}]"), ClusterSecret("secret"))
        assert before.tenant(b"Bearer old") == after.tenant(b"Bearer new")
        assert before.tenant(b"Bearer old").name == "a"
        assert before.tenant(b"Bearer old").salt != before.tenant(b"Bearer other").salt

    def test_a_tenants_salt_depends_on_the_clusters_secret(self, tmp_path: Path) -> None:
        entries = self._read(tmp_path, "[{key: one, name: a}]")
        salts = {Keys([], entries, ClusterSecret(text)).tenant(b"Bearer one").salt for text in ("", "x", "y")}
        assert len(salts) == 3

    def test_replaced_entries_are_valid_at_once(self, tmp_path: Path) -> None:
        keys = Keys(["kept"], self._read(tmp_path, "[{key: old}]"))
        keys.replace(self._read(tmp_path, "[{key: new}]"))
        assert keys.tenant(b"Bearer kept").admin
        assert not keys.tenant(b"Bearer new").admin
        with pytest.raises(ApiError):
            keys.tenant(b"Bearer old")

    def test_with_a_secret_alone_no_key_is_needed(self) -> None:
        assert Keys([], secret=ClusterSecret("token")).tenant(b"") == Tenant()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "must be a list of keys: the file"),
            ("key: one", "must be a list of keys"),
            ("[one]", "must be a list of keys: 0"),
            ("- {key: one, role: admin}", "0.role: Extra inputs"),
            ("- {key: ''}", "0.key: Value should have at least 1 item"),
            ("- {key: one, min_priority: -101}", "0.min_priority: Input should be greater than or equal to -100"),
            ("- {key: one}\n- {key: one, admin: true}", "has a key twice"),
            ("[]", "has no key"),
            ("- {key: one, name: _a}", "0.name: String should match"),
            ("- {key: one, name: a}\n- {key: two, name: a, admin: true}", "has different rights for the keys of a"),
            ("- {key: one", "is not valid YAML"),
            ("- key: \x00", "is not valid YAML"),
            ("- key: 2026-31-12", "is not valid YAML"),
            ('- key: "\\ud800"', "is not valid YAML"),
            ("[" * 5000, "is not valid YAML"),
            ("- {key: one}\n- {key: 'one '}", "has a key twice"),
        ],
    )
    def test_errors_in_it_do_not_show_its_keys(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigError) as error:
            self._read(tmp_path, text)
        assert message in str(error.value)
        assert "one" not in str(error.value)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "text", ["- key: |\n    one\n", "- key: ' one '\n", "- key: one\r\n", "\ufeff- key: one\n"]
    )
    def test_white_space_around_a_key_does_not_count(self, tmp_path: Path, text: str) -> None:
        assert not Keys([], self._read(tmp_path, text)).tenant(b"Bearer one").admin

    def test_a_missing_one_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"nowhere can't be read: .*No such file"):
            read_keys(tmp_path / "nowhere")
