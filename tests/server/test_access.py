"""Who is let in: the bind rule, the key, Host and Origin, CORS."""

from __future__ import annotations

import asyncio
import logging

import pytest

from strata_cli.errors import ConfigError
from strata_cli.server.access import AccessRules, check_bind, has_key, host_name, refusal
from tests.server.asgi import JSON, Answer, ask, call, get
from tests.server.fake_engine import FakeEngine, new_app

LOCAL = AccessRules(listen="127.0.0.1")
WIDE = AccessRules(
    listen="0.0.0.0",
    allowed_hosts=("gpu.example", ".lan"),
    trusted_origins=("https://chat.example",),
    cors_origins=("https://app.example",),
)
KEYED = AccessRules(listen="0.0.0.0", api_key="sesame")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "a.localhost"])
def test_this_machine_alone_needs_no_key(host: str) -> None:
    check_bind(host, has_key=False, allow_no_key=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "gpu.example"])
def test_others_are_let_in_with_a_key_or_on_demand_only(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host {host} lets other machines .* there is no key"):
        check_bind(host, has_key=False, allow_no_key=False)
    check_bind(host, has_key=True, allow_no_key=False)
    check_bind(host, has_key=False, allow_no_key=True)


@pytest.mark.parametrize(
    ("headers", "is_right"),
    [
        ({}, False),
        ({"authorization": "Bearer sesame"}, True),
        ({"authorization": "bearer  sesame "}, True),
        ({"authorization": "Basic sesame"}, False),
        ({"authorization": "sesame"}, False),
        ({"authorization": "Bearer sesam"}, False),
        ({"authorization": "Bearer sesame2"}, False),
        ({"authorization": "Bearer \xff\xfe"}, False),
        ({"x-api-key": "sesame"}, True),
        ({"x-api-key": "Sesame"}, False),
        ({"x-api-key": "wrong", "authorization": "Bearer sesame"}, True),
    ],
)
def test_the_key_comes_in_either_header(headers: dict[str, str], is_right: bool) -> None:
    assert has_key("sesame", headers) is is_right
    failure = refusal(KEYED, "POST", "/v1/completions", headers)
    assert (failure is None) is is_right
    assert failure is None or "sesame" not in failure.message


@pytest.mark.parametrize("path", ["/status", "/metrics", "/v1/models", "/nothing"])
def test_all_but_health_needs_the_key(path: str) -> None:
    app = new_app(FakeEngine(), rules=KEYED)
    answer = get(app, path)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.error["type"] == "authentication_error"
    assert get(app, path, authorization="Bearer sesame").status != 401
    assert get(app, "/health").status == 200


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:8080", "localhost"),
        ("LOCALHOST.", "localhost"),
        ("[::1]:80", "::1"),
        ("1.2.3.4", "1.2.3.4"),
        ("a b", None),
        ("a:b:c", None),
        ("a/../b", None),
        ("", None),
        ("x:123456", None),
    ],
)
def test_a_host_is_a_name_and_perhaps_a_port(host: str, name: str | None) -> None:
    assert host_name(host) == name


@pytest.mark.parametrize(
    "host", ["localhost", "x.localhost:1", "127.0.0.1:8080", "[::1]", "8.8.8.8"]
)
@pytest.mark.parametrize("rules", [LOCAL, WIDE])
def test_local_names_and_numbers_are_names_of_the_server(rules: AccessRules, host: str) -> None:
    assert refusal(rules, "GET", "/v1/models", {"host": host}) is None


@pytest.mark.parametrize(
    ("rules", "host", "is_let_in"),
    [
        (LOCAL, "rebound.example", False),
        (LOCAL, "gpu.example", False),
        (LOCAL, "host.docker.internal", False),
        (LOCAL, "not a host", False),
        (WIDE, "rebound.example", False),
        (WIDE, "gpu.example:8080", True),
        (WIDE, "box.lan", True),
        (WIDE, "lan", False),
        (WIDE, "chat.example", True),
        (WIDE, "host.docker.internal", True),
        (AccessRules(listen="127.0.0.1", allowed_hosts=("*",)), "anything.example", True),
    ],
)
def test_other_names_must_be_allowed(rules: AccessRules, host: str, is_let_in: bool) -> None:
    failure = refusal(rules, "GET", "/v1/models", {"host": host})
    assert (failure is None) is is_let_in
    assert failure is None or (failure.status == 403 and "allowed_hosts" in failure.message)


@pytest.mark.parametrize(
    ("rules", "origin", "is_let_in"),
    [
        (LOCAL, "http://localhost:3000", True),
        (LOCAL, "http://127.0.0.1:8080", True),
        (LOCAL, "https://chat.example", False),
        (LOCAL, "http://8.8.8.8", False),
        (LOCAL, "http://127.0.0.1.example", False),
        (LOCAL, "null", False),
        (LOCAL, "file://", False),
        (LOCAL, "http://[bad", False),
        (LOCAL, "chrome-extension://abc", True),
        (LOCAL, "app://obsidian.md", True),
        (WIDE, "https://chat.example", True),
        (WIDE, "https://chat.example:444", False),
        (WIDE, "https://app.example", True),
        (WIDE, "http://gpu.example:9", True),
        (WIDE, "http://evil.example", False),
    ],
)
def test_pages_must_be_local_or_trusted(rules: AccessRules, origin: str, is_let_in: bool) -> None:
    headers = {"host": "127.0.0.1:8080", "origin": origin}
    failure = refusal(rules, "POST", "/v1/completions", headers)
    assert (failure is None) is is_let_in
    assert failure is None or (failure.status == 403 and "trusted_origins" in failure.message)


def test_a_page_of_the_server_itself_may_ask() -> None:
    headers = {"host": "192.168.1.2:8080", "origin": "http://192.168.1.2:8080"}
    assert refusal(WIDE, "POST", "/v1/completions", headers) is None


def test_a_page_cannot_post_by_calling_json_something_else() -> None:
    app = new_app(FakeEngine())
    headers = {"content-type": "text/plain"}
    answer = asyncio.run(call(app, "POST", "/v1/completions", b"{}", headers=headers))
    assert answer.status == 415


def preflight(path: str, origin: str) -> Answer:
    headers = {"origin": origin, "access-control-request-method": "POST"}
    app = new_app(FakeEngine(), rules=WIDE)
    return asyncio.run(call(app, "OPTIONS", path, headers=headers))


def test_cors_opens_v1_to_the_pages_that_were_named() -> None:
    answer = preflight("/v1/completions", "https://app.example")
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in answer.headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    ("path", "origin"),
    [("/v1/completions", "https://chat.example"), ("/status", "https://app.example")],
)
def test_cors_opens_nothing_else(path: str, origin: str) -> None:
    answer = preflight(path, origin)
    assert answer.status == 405
    assert "access-control-allow-origin" not in answer.headers


def test_the_log_names_a_refused_host_once_and_no_prompt_or_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "strata_cli")
    app = new_app(FakeEngine([1, 2]))
    for _ in range(3):
        assert get(app, "/v1/models", host="rebound.example").status == 403
    assert sum("is not a name of this server" in line for line in caplog.messages) == 1
    keyed = new_app(FakeEngine([1, 2]), rules=KEYED)
    headers = {**JSON, "authorization": "Bearer sesame"}
    body = b'{"prompt": "a secret wish"}'
    assert asyncio.run(call(keyed, "POST", "/v1/completions", body, headers=headers)).status == 200
    assert ask(keyed, "/v1/completions", prompt="a secret wish").status == 401
    assert not any("secret" in line or "sesame" in line for line in caplog.messages)
    assert any(line.startswith("POST /v1/completions: 200 in") for line in caplog.messages)
