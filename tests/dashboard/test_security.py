from __future__ import annotations

from pathlib import Path

import pytest
from flask.testing import FlaskClient

from gradaudit_dashboard.app import create_app
from tests.dashboard import runs

HOME = "http://127.0.0.1:8050"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> FlaskClient:
    root = tmp_path_factory.mktemp("root")
    runs.one_step(root / "runs" / "a")
    runs.one_step(root / "runs" / "b")
    (root / "secret.txt").write_text("do not tell", encoding="utf-8")
    return create_app(root / "runs").server.test_client()


@pytest.mark.parametrize(
    "path", ["/", "/r/a", "/r/nope", "/r/..%2F..%2Fsecret.txt", "/elsewhere/at/all", "/healthz", "/_dash-layout"]
)
def test_every_answer_carries_the_security_headers(client: FlaskClient, path: str) -> None:
    answer = client.get(path, base_url=HOME, buffered=True)

    policy = answer.headers["Content-Security-Policy"]
    assert answer.status_code == 200
    assert "unsafe-eval" not in policy
    assert "script-src 'self' 'sha256-" in policy
    assert "connect-src 'self'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_assets_and_errors_carry_them_too(client: FlaskClient) -> None:
    for path in ("/assets/style.css", "/assets/nope.css"):
        assert "Content-Security-Policy" in client.get(path, base_url=HOME, buffered=True).headers


@pytest.mark.parametrize("host", ["127.0.0.1:8050", "localhost:8050", "[::1]:8050"])
def test_this_machines_own_names_are_answered(client: FlaskClient, host: str) -> None:
    assert client.get("/", base_url=HOME, buffered=True, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8050", "127.0.0.1:9999", "127.0.0.1", "127.0.0.1.evil.test:8050", "", "::1"],
)
@pytest.mark.parametrize("path", ["/", "/_dash-layout", "/_dash-dependencies", "/assets/style.css", "/healthz"])
def test_a_foreign_host_is_refused_everywhere(client: FlaskClient, host: str, path: str) -> None:
    answer = client.get(path, base_url=HOME, buffered=True, headers={"Host": host})

    assert answer.status_code == 403
    assert b"127.0.0.1" in answer.data
    assert "Content-Security-Policy" in answer.headers


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:8050", "http://127.0.0.1:9999"])
def test_a_foreign_origin_is_refused(client: FlaskClient, origin: str) -> None:
    headers = {"Origin": origin}

    assert client.post("/_dash-update-component", base_url=HOME, headers=headers, json={}).status_code == 403
    assert client.get("/", base_url=HOME, headers=headers).status_code == 403


def test_its_own_origin_is_answered(client: FlaskClient) -> None:
    assert client.get("/", base_url=HOME, headers={"Origin": HOME}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../secret.txt",
        "/assets/..%2Fsecret.txt",
        "/assets/%2e%2e/%2e%2e/secret.txt",
        "/_dash-component-suites/../../secret.txt",
        "/_dash-component-suites/dash/../../../secret.txt",
        "/_dash-component-suites/os/path.py",
        "/r/../../secret.txt",
    ],
)
def test_no_path_leads_out(client: FlaskClient, path: str) -> None:
    answer = client.get(path, base_url=HOME, buffered=True)

    assert answer.status_code in (200, 404)
    assert b"do not tell" not in answer.data
    assert b"Traceback" not in answer.data


def test_the_page_asks_for_nothing_from_elsewhere(client: FlaskClient) -> None:
    page = client.get("/", base_url=HOME, buffered=True).text

    assert "http://" not in page.replace(HOME, "")
    assert "https://" not in page
    assert 'lang="en"' in page


def test_there_is_no_mcp_server_and_no_debugger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_MCP_ENABLED", "true")
    monkeypatch.setenv("DASH_DEBUG", "true")
    app = create_app(runs.one_step(tmp_path / "a"))

    assert not [rule for rule in app.server.url_map.iter_rules() if "mcp" in rule.rule.lower()]
    assert app.server.debug is False


def test_building_the_app_reads_no_run(tmp_path: Path) -> None:
    app = create_app(tmp_path / "not" / "there")

    assert app.server.test_client().get("/", base_url=HOME, buffered=True).status_code == 200
