import pytest

from cpd.common.errors import ConfigError
from deploy.up import _check_hosts


@pytest.mark.parametrize(
    ("host", "embedded", "has_own_secret", "reason"),
    [
        ("0.0.0.0", False, False, "2 hosts, which need a common secret: write one to a file"),
        ("0.0.0.0", True, True, "can't share an embedded Redis"),
        ("127.0.0.1", False, True, "pass --host 0.0.0.0"),
    ],
)
def test_several_hosts_need_what_they_share(host: str, embedded: bool, has_own_secret: bool, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        _check_hosts(2, host, embedded=embedded, has_own_secret=has_own_secret)
    _check_hosts(1, host, embedded=embedded, has_own_secret=has_own_secret)
