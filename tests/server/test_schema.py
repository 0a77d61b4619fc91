"""The OpenAPI schema against the server: no request breaks it, and what comes back is what the schema says."""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from prometheus_client.parser import text_string_to_metric_families
from running import Running, running
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from everwarm.server.anthropic import request as anthropic
from everwarm.server.openai import request as openai
from everwarm.server.serving import Limits
from short_and_long import short_and_long
from tiny import Tiny
from waiting_until import PATIENCE_S

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance, not_a_server_error]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    Tiny(context=64).write(path)
    with running(path, tmp_path_factory.mktemp("home"), limits=Limits(timeout_s=5)) as server:
        yield server


EACH = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_the_schema_names_every_route(server: Running) -> None:
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    assert {"/health", "/metrics", "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/messages"} <= set(
        paths
    )


@pytest.mark.slow
@short_and_long("examples", 8, 60)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_that_the_schema_allows_or_forbids_breaks_the_server(
    server: Running, mode: GenerationMode, examples: int
) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    failures: dict[str, str] = {}
    known = cycle([True, False])
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "everwarm": {"agent": "tiny"}}
    assert httpx.post(server.url + "/v1/chat/completions", json=body).status_code == 200
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(EACH, max_examples=examples)
        @given(case=operation.as_strategy(generation_mode=mode))
        def each(case: Any) -> None:
            if "name" in case.path_parameters and next(known):  # else hardly one would be of an agent that is there
                case.path_parameters["name"] = "tiny"
            response = case.call(timeout=PATIENCE_S)
            if response.status_code != 503 or "retry-after" not in response.headers:
                case.validate_response(response, checks=CHECKS)

        try:
            each()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # nothing can be wrong where nothing is asked for
        except FailureGroup as failure:
            failures[operation.label] = "\n".join(map(str, failure.exceptions))
    assert not failures, "\n\n".join(f"{label}: {text}" for label, text in failures.items())


def test_the_docs_name_every_endpoint_metric_and_ignored_field(server: Running) -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    short = {path.replace("/v1/agents/{name}/", ".../") for path in paths}
    missing = [path for path in sorted(short) if path not in text and path != ".../fork"]
    families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
    names = [family.name.removeprefix("everwarm_") for family in families]
    missing += [n for n in names if n not in text and n.replace("weight_cache", "") not in text and "process_" not in n]
    missing += [field for field in openai.IGNORED | anthropic.IGNORED if f"`{field}`" not in text]
    assert missing == []
