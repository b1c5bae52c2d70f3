import pytest

from cpd.common.errors import ConfigError
from cpd.common.trust import ClusterSecret
from deploy.sealed import seal, unseal

VALUES = {"CPD_REDIS_URL": "redis://:hidden@r", "CPD_API_KEY": "hidden"}


def test_only_the_same_secret_opens_what_is_sealed() -> None:
    sealed = seal(ClusterSecret("secret"), VALUES)
    assert b"hidden" not in sealed
    assert sealed != seal(ClusterSecret("secret"), VALUES)
    assert unseal(ClusterSecret("secret"), sealed) == VALUES
    with pytest.raises(ConfigError, match="another secret on this machine"):
        unseal(ClusterSecret("guess"), sealed)
