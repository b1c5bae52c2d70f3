import pytest

from router.errors import ApiError
from router.tenants import Keys, Tenant


def test_without_keys_everyone_is_the_same_tenant() -> None:
    assert Keys([]).tenant(b"") == Keys([]).tenant(b"Bearer x") == Tenant()


def test_every_key_is_a_tenant_of_its_own() -> None:
    keys = Keys(["one", "two"])
    one, two = keys.tenant(b"Bearer one"), keys.tenant(b"bearer  two ")
    assert one.name != two.name
    assert one.salt != two.salt
    assert Keys(["one"]).tenant(b"Bearer one") == one


def test_a_tenants_name_and_salt_do_not_tell_the_key() -> None:
    tenant = Keys(["one"]).tenant(b"Bearer one")
    assert "one" not in tenant.name
    assert b"one" not in tenant.salt


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer ", b"one", b"Basic one", b"Bearer on", b"Bearer one\xff"])
def test_a_missing_or_wrong_key_is_refused(header: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        Keys(["one", "two"]).tenant(header)
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")
