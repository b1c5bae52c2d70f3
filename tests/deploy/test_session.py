import pytest

from cpd.common.errors import ConfigError
from cpd.common.settings import ClusterSettings
from deploy.endpoint import pick_port
from deploy.session import RaySession, check_hosts, joined_ray

HERE, THERE = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "somewhere", "127.0.0.1:", ":6379", "127.0.0.1:x"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port or auto"), joined_ray("test", address):
        pass


def test_a_missing_ray_cluster_is_an_error() -> None:
    port = pick_port("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="nothing answers there"), joined_ray("test", f"127.0.0.1:{port}"):
        pass


@pytest.mark.parametrize(
    ("url", "host", "addresses", "embedded", "sentence"),
    [
        ("unix:///run/redis.sock", "0.0.0.0", (HERE, THERE), True, "can't share an embedded Redis"),
        ("redis://localhost:6379", "0.0.0.0", (HERE, THERE), False, "--redis-url is an address of this one only"),
        ("redis://:pass@127.0.0.1/0", "0.0.0.0", (HERE, THERE), False, "--redis-url is an address of this one only"),
        ("unix:///run/redis.sock", "0.0.0.0", (HERE, THERE), False, "--redis-url is an address of this one only"),
        ("redis://redis:6379", "127.0.0.1", (HERE, THERE), False, "pass --host 0.0.0.0"),
        ("redis://redis:6379", "0.0.0.0", ("127.0.0.1", THERE), False, "with --node-ip-address"),
    ],
)
def test_what_keeps_several_hosts_apart_is_refused(
    url: str, host: str, addresses: tuple[str, ...], embedded: bool, sentence: str
) -> None:
    settings = ClusterSettings(redis_url=url, host=host)
    with pytest.raises(ConfigError, match=sentence):
        check_hosts(RaySession(addresses, {}), settings, embedded=embedded, has_own_secret=True)
    check_hosts(RaySession((HERE,), {}), settings, embedded=embedded, has_own_secret=False)


def test_several_hosts_that_reach_each_other_and_have_a_secret_are_accepted() -> None:
    settings = ClusterSettings(redis_url="redis://10.0.0.9:6379", host="0.0.0.0")
    check_hosts(RaySession((HERE, THERE), {}), settings, embedded=False, has_own_secret=True)
    with pytest.raises(ConfigError, match="need a common secret: write one to a file"):
        check_hosts(RaySession((HERE, THERE), {}), settings, embedded=False, has_own_secret=False)


def test_a_ray_that_grows_is_one_of_several_hosts_from_the_start() -> None:
    settings = ClusterSettings(redis_url="redis://10.0.0.9:6379", host="0.0.0.0")
    growing = RaySession((HERE,), {"cpd_grows": 1})
    check_hosts(growing, settings, embedded=False, has_own_secret=True)
    with pytest.raises(ConfigError, match="has several hosts, which can't share an embedded Redis"):
        check_hosts(growing, settings, embedded=True, has_own_secret=True)
