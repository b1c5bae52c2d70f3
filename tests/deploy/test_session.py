import pytest

from cpd.common.errors import ConfigError
from deploy.endpoint import pick_port
from deploy.session import joined_ray


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "somewhere", "127.0.0.1:", ":6379", "127.0.0.1:x"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port or auto"), joined_ray("test", address):
        pass


def test_a_missing_ray_cluster_is_an_error() -> None:
    port = pick_port("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="nothing answers there"), joined_ray("test", f"127.0.0.1:{port}"):
        pass
