"""Requests made from `/openapi.json`, valid and invalid ones, are answered as declared, never by an error of ours."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from models import tiny
from tests.e2e.client import MODEL
from tests.e2e.cluster import Cluster

CHECKS = (
    *("not_a_server_error", "unsupported_method", "negative_data_rejection"),
    *("status_code_conformance", "content_type_conformance", "response_schema_conformance"),
)
CASES = 40
"""Requests generated for each operation, besides those that cover the parts of its schema."""

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("keys", [[], ["secret"]], ids=["without-keys", "with-keys-and-no-key-sent"])
def test_generated_requests_are_answered_as_declared(tmp_path: Path, keys: list[str]) -> None:
    with Cluster(
        model=str(tiny.CHECKPOINT),
        served_model_name=MODEL,
        simulate="instant",
        prefill=1,
        combined=1,
        api_key=keys,
        store_responses=60.0,
    ) as cluster:
        document = httpx.get(f"{cluster.url}/openapi.json").json()
        for name in (
            "ChatRequest",
            "CompletionRequest",
            "ResponsesRequest",
            "MessagesRequest",
            "CountTokensRequest",
        ):  # most requests name the model, so that they go further
            document["components"]["schemas"][name]["properties"]["model"] = {"const": MODEL}
        operations = [operation for path in document["paths"].values() for operation in path.values()]
        for operation in operations:
            parameters = operation.get("parameters", [])  # a time limit of a few ms is exceeded: 503, as documented
            operation["parameters"] = [one for one in parameters if one["name"] != "x-request-timeout-ms"]
        file = tmp_path / "openapi.json"
        file.write_text(json.dumps(document))
        command = [sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", cluster.url]
        command += ["--checks", ",".join(CHECKS)]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(CASES), "--seed", "1"]
        command += ["--continue-on-failure", "--generation-database", "none", "--no-color", "--warnings", "off"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert f"Tested: {len(operations)}" in done.stdout
        assert not [line for line in cluster.log("router-0") if "Traceback" in line]
