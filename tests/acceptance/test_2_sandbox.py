"""What a client, an auditor and a second run see of the sandbox."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from tests.live import STATE, Sandbox, changed, make_certificate

CLOSED = [
    "/",
    "/healthz",
    "/v1/router/status",
    "/docs",
    "/metrics",
    "/mcp",
    "/v1/default/banks",
    "/v1/models",
]
TRICKS = [
    "//v1/memory",
    "/V1/MEMORY",
    "/v1/%6demory",
    "/v1/x/../memory",
    "/v1/memory%2Fmcp",
    "/v1/memory/",
    "/v1/memory?a=b",
]


def test_a_memory_comes_back(sandbox: Sandbox) -> None:
    word = "token" + secrets.token_hex(6)
    assert sandbox.call("retain", {"content": f"The harbour master of {word} is Ines."})[0] == 200
    status, body = sandbox.call("recall", {"query": f"Who is the harbour master of {word}?"})
    assert status == 200 and any(word in item["text"] for item in body["result"]["results"])


@pytest.mark.parametrize("key", ["", "ask_" + "x" * 43])
def test_without_the_right_key_nothing_opens(sandbox: Sandbox, key: str) -> None:
    status, body = sandbox.call("recall", {"query": "x"}, key=key)
    assert (status, body["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("target", CLOSED + TRICKS)
def test_every_other_target_is_closed(sandbox: Sandbox, target: str) -> None:
    """F2: closed for GET and for POST with a body, over HTTP/2 and HTTP/1.1."""
    key = ["-H", f"Authorization: Bearer {sandbox.key_file.read_text().strip()}"]
    assert sandbox.status_of(target, *key) == "404"
    assert sandbox.status_of(target, *key, "-d", "{}") == "404"
    assert sandbox.status_of(target, *key, "--http1.1", "-d", "{}") == "404"


def test_a_large_body_gets_the_routers_own_answer(sandbox: Sandbox) -> None:
    """S2-23."""
    status, body = sandbox.call("recall", {"query": "x" * 66_000})
    assert (status, body["error"]["type"]) == (413, "payload_too_large")


def test_identity_headers_of_a_client_do_not_arrive(sandbox: Sandbox) -> None:
    """S2-37: the router would answer 400 to these; the edge takes them off."""
    headers = ["-H", "X-Bank-Id: other", "-H", "X-Memory-Principal: other", "-H", "X-Consumer-Id: other"]
    key = ["-H", f"Authorization: Bearer {sandbox.key_file.read_text().strip()}"]
    assert (
        sandbox.status_of(
            "/v1/memory", *headers, *key, "-d", '{"alias":"memory.sandbox","operation":"recall"}'
        )
        == "422"
    )


def test_sensitive_content_is_refused_and_not_echoed(sandbox: Sandbox) -> None:
    """S2-20, S2-70."""
    secret = "gh" + "p_" + "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8"
    status, body = sandbox.call("retain", {"content": f"The token is {secret}."})
    assert (status, body["error"]["type"]) == (422, "memory_rejected")
    assert secret not in json.dumps(body)


def test_context_and_tags_are_not_screened_as_documented(sandbox: Sandbox) -> None:
    """The known hole of docs/security.md: if this fails, upstream screens more than before; change the page."""
    secret = "gh" + "p_" + "Z9y8X7w6V5u4T3s2R1q0P9o8N7m6L5k4J3i2"
    status, _ = sandbox.call(
        "retain", {"content": "A note with a remark.", "context": f"The token is {secret}."}
    )
    assert status == 200


def test_a_second_run_changes_nothing(sandbox: Sandbox) -> None:
    """C2: the recap says so, and so do container ids and start times."""
    question = "docker inspect -f '{{.Id}} {{.State.StartedAt}}' $(docker ps -q) | sort"
    before = sandbox.on_host(question)
    assert changed(sandbox.playbook("site.yml").stdout) == [0]
    assert sandbox.on_host(question) == before


def test_check_mode_on_a_converged_host_reports_nothing_and_shows_no_secret(sandbox: Sandbox) -> None:
    """A8, A9: at the highest verbosity no secret of the host is in the output."""
    done = sandbox.playbook("site.yml", "--check", "--diff", "-vvv")
    assert changed(done.stdout) == [0]
    names = sandbox.on_host("ls /etc/memory/secrets/store /etc/memory/device-keys/*.key").split()
    assert len(names) >= 6
    values = sandbox.on_host(
        "cat /etc/memory/device-keys/*.key; for f in /etc/memory/secrets/store/*; do cat $f; echo; done"
    )
    leaked = [value[:4] + "…" for value in values.split() if value in done.stdout + done.stderr]
    assert leaked == []


def test_secrets_of_the_inventory_do_not_show_at_the_highest_verbosity(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """A8, A9: every secret that an inventory can change, and the private key of a certificate, in check mode with -vvv."""
    canaries = {
        "hindsight_stack_api_key": "canary-9f31-operator-key",
        "hindsight_stack_llm_api_key": "canary-9f32-provider-key",
        "hindsight_stack_embeddings_api_key": "canary-9f33-embeddings",
        "memory_router_master_token": "canary-9f34-master-token",
    }
    certificate = make_certificate(tmp_path, sandbox.url.removeprefix("https://"))
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({**canaries, **certificate}))
    done = sandbox.playbook("site.yml", "--check", "--diff", "-vvv", "-e", f"@{settings}")
    key_lines = Path(certificate["memory_edge_private_key_file"]).read_text().splitlines()[1:-1]
    assert key_lines
    leaked = [value for value in [*canaries.values(), *key_lines] if value in done.stdout + done.stderr]
    assert leaked == []


def test_another_database_password_in_the_inventory_is_refused_and_the_old_one_kept(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """A6: the password that works is not overwritten; the refusal can be read although its task hides what it prints."""
    store = "sha256sum /etc/memory/secrets/store/* /etc/memory/secrets/[ehpr]*/*"
    before = sandbox.on_host(store)
    for name in ("hindsight_stack_database_password", "hindsight_stack_postgres_superuser_password"):
        settings = tmp_path / "settings.json"
        settings.write_text(json.dumps({name: "another-password-0001"}))
        done = sandbox.playbook("site.yml", "-e", f"@{settings}", check=False)
        assert done.returncode != 0 and "[database-password]" in done.stdout
        assert sandbox.on_host(store) == before


def test_a_truncated_secret_on_the_host_is_refused_by_name(sandbox: Sandbox) -> None:
    """A3: the message names the secret and shows no value."""
    path = "/etc/memory/secrets/store/router-master-token"
    sandbox.on_host(f"cp -p {path} /root/kept && printf 'ab c\\r\\n' > {path}")
    try:
        done = sandbox.playbook("site.yml", check=False)
        assert done.returncode != 0 and "router-master-token" in done.stdout and "ab c" not in done.stdout
    finally:
        sandbox.on_host(f"cp -p /root/kept {path} && rm /root/kept")


def test_check_mode_reports_a_live_service_that_does_not_pass(sandbox: Sandbox) -> None:
    """I4: a check run on a host whose readback fails is no success; the run itself mends the bank."""
    database = "docker exec -u postgres $(docker ps -qf label=com.docker.compose.service=postgres)"
    wrong = "update banks set config = config - 'memory_defense' where bank_id = 'sandbox'"
    sandbox.on_host(f'{database} psql -d hindsight -c "{wrong}"')
    done = sandbox.playbook("site.yml", "--check", check=False)
    assert done.returncode != 0 and "banks: fail" in done.stdout
    sandbox.playbook("site.yml")


def test_a_container_of_an_earlier_release_is_removed(sandbox: Sandbox) -> None:
    """A service that is no longer part of the release does not stay behind."""
    edge = "$(docker ps -qf label=com.docker.compose.service=edge)"
    labels = "--label com.docker.compose.project=memory --label com.docker.compose.service=former"
    labels += " --label com.docker.compose.oneoff=False --label com.docker.compose.config-hash=x"
    labels += " --label com.docker.compose.project.config_files=/var/lib/memory/releases/x/compose.yaml"
    sandbox.on_host(f"docker run -d {labels} $(docker inspect -f '{{{{.Config.Image}}}}' {edge}) sleep 3600")
    assert changed(sandbox.playbook("site.yml").stdout) != [0]
    assert sandbox.on_host("docker ps -aq --filter label=com.docker.compose.service=former") == ""


def test_starting_in_the_middle_is_refused(sandbox: Sandbox) -> None:
    task = "image_supply : Fetch the images of the lock"
    done = sandbox.playbook("site.yml", "--start-at-task", task, check=False)
    assert done.returncode != 0 and "did not run before this task" in done.stdout


def test_preflight_changes_nothing(sandbox: Sandbox) -> None:
    listing = (
        "find /etc/memory /var/lib/memory/releases /var/lib/memory/config -printf '%p %m %u %T@\\n' | sort"
    )
    before = sandbox.on_host(listing)
    assert changed(sandbox.playbook("preflight.yml").stdout) == [0]
    assert sandbox.on_host(listing) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hindsight_stack_origin_address": "8.8.8.8"}, "hindsight_stack_origin_address"),
        ({"memory_edge_bind_addresses": ["192.0.2.77"]}, "memory_edge_bind_addresses"),
        ({"hindsight_stack_worker_id": "worker$1"}, "hindsight_stack_worker_id"),
        ({"hindsight_stack_database_password": 123456}, "hindsight_stack_database_password"),
        ({"memory_router_keys_principals": [{"name": "a", "alias": "Not An Alias", "bank": "b"}]}, "alias"),
    ],
)
def test_bad_settings_are_refused_before_any_change(
    sandbox: Sandbox, settings: dict[str, object], words: str
) -> None:
    journal = "wc -l < /var/lib/memory/journal/activations.jsonl; ls /var/lib/memory/releases"
    before = sandbox.on_host(journal)
    done = sandbox.playbook("site.yml", "-e", json.dumps(settings), check=False)
    assert done.returncode != 0 and words in done.stdout and "fix" in done.stdout.lower()
    assert sandbox.on_host(journal) == before


def test_tags_cannot_drop_a_gate(sandbox: Sandbox) -> None:
    for option in (["--tags", "x"], ["--skip-tags", "always"], ["--skip-tags", "x"]):
        done = sandbox.playbook("site.yml", *option, check=False)
        assert done.returncode != 0, option
        assert "--tags" in done.stdout, option


def test_the_lock_is_what_runs(sandbox: Sandbox) -> None:
    lock = {image["name"]: image for image in json.loads((STATE / "images.lock.json").read_text())["images"]}
    references = sandbox.on_host("docker ps --format '{{.Image}}' --no-trunc").split()
    expected = {f"{image['repository']}:{image['tag']}@{image['index_digest']}" for image in lock.values()}
    assert set(references) <= expected and len(references) == 6


def test_a_changed_secret_of_the_database_is_refused_by_name_and_the_data_stays(sandbox: Sandbox) -> None:
    """A6: a password changed on the host is refused by name, and the password that works comes back by itself."""
    store = "/etc/memory/secrets/store/postgres-hindsight-password"
    before = sandbox.on_host(f"sha256sum {store}")
    sandbox.on_host(f"printf another-password-of-the-role > {store}")
    done = sandbox.playbook("site.yml", check=False)
    assert done.returncode != 0 and "[database-password]" in done.stdout
    assert "data volume must stay" in done.stdout and "serves again" in done.stdout
    assert sandbox.on_host(f"sha256sum {store}") == before
    assert sandbox.call("recall", {"query": "x"})[0] == 200
    assert changed(sandbox.playbook("site.yml").stdout) == [0]
