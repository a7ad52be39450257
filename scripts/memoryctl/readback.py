"""The readback: authenticated questions that decide whether a release is good.

A gate is asked once. It passes, fails, or could not be asked; only the first is a pass. Memories are stored exactly
once per readback, under a new marker: after an interruption nobody knows whether a retain happened.
"""

from __future__ import annotations

import json
import secrets
import ssl
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from . import database, engine, files, hindsight, policy, process, release, secretstore
from .errors import PROGRAM_FAULTS, Refused
from .layout import Layout
from .web import Answer, Endpoint

MEMORY = "/v1/memory"
MCP = "/v1/memory/mcp"
MCP_VERSION = "2025-11-25"
CANARY = "canary"
EXCHANGE_TIMEOUT = 60.0
RECALL_ATTEMPTS = 3
WORKER_POLL_SECONDS = 60.0
# Built at run time: no text of this program may look like a credential to a scanner.
SENSITIVE = "gh" + "p_" + "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8"
CLOSED_TARGETS = (
    "/",
    "/healthz",
    "/health",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/mcp",
    "/v1/models",
    "/v1/router/status",
    "/v1/default/banks",
    "/v1/chat/completions",
    "/v1/memory/",
    "/v1/memory/mcp/",
    "/v1/memory?x=1",
    "//v1/memory",
    "/V1/MEMORY",
    "/v1/%6demory",
    "/v1/x/../memory",
    "/v1/memory%2Fmcp",
    "/v1/memory%20",
    "/v1/memory/../../metrics",
)


# Gates that store a memory, would store one if what they guard were broken, or look for one that was stored.
STORING = ("defense-blocks", "extra-argument", "retain", "recall", "mcp-recall")


class CouldNotAsk(Exception):
    """The question of a gate got no answer that could be judged."""


# Whatever goes wrong in putting a question or reading the answer: it was not answered.
UNANSWERED = (CouldNotAsk, Refused, *PROGRAM_FAULTS)


@dataclass(frozen=True)
class Finding:
    """What a gate expected and observed."""

    expected: str
    observed: str

    @property
    def good(self) -> bool:
        return self.expected == self.observed


@dataclass(frozen=True)
class Verdict:
    """The outcome of one gate; latency in milliseconds."""

    id: str
    proves: str
    expected: str
    observed: str
    verdict: str
    latency_ms: int


@dataclass(frozen=True)
class Gate:
    """A named question."""

    id: str
    proves: str
    ask: Callable[[Context], Finding]


GATES: dict[str, Gate] = {}


def gate(gate_id: str, proves: str) -> Callable[[Callable[[Context], Finding]], Callable[[Context], Finding]]:
    """Register the decorated function as a gate."""

    def register(ask: Callable[[Context], Finding]) -> Callable[[Context], Finding]:
        GATES[gate_id] = Gate(gate_id, proves, ask)
        return ask

    return register


class Context:
    """What the gates of one readback share; answers that several gates judge are fetched once."""

    def __init__(self, layout: Layout, subject: release.Release, compose: engine.Compose) -> None:
        self.layout = layout
        self.release = subject
        self.compose = compose
        self.marker = f"readback-{secrets.token_hex(8)}"

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.release.manifest

    @cached_property
    def canary(self) -> Mapping[str, Any]:
        return next(item for item in self.manifest["principals"] if item["name"] == CANARY)

    @cached_property
    def key(self) -> str:
        return (self.layout.device_keys / f"{CANARY}.key").read_text().strip()

    @cached_property
    def containers(self) -> dict[str, engine.Container]:
        return engine.containers(self.manifest["project"])

    @cached_property
    def edge(self) -> Endpoint:
        settings = self.manifest["edge"]
        return Endpoint(
            settings["bind_addresses"][0], settings["port"], self._tls(settings), settings["names"][0]
        )

    def _tls(self, settings: Mapping[str, Any]) -> ssl.SSLContext:
        authority = self.layout.edge / "ca.crt"
        if settings["tls_mode"] == "provided":
            # Trust is the declared fingerprint of the leaf, which the gate edge-certificate compares.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        return ssl.create_default_context(cafile=str(authority) if settings["private_authority"] else None)

    @cached_property
    def upstream(self) -> hindsight.Hindsight:
        return upstream_client(self.layout, self.release)

    def post(
        self,
        body: Any,
        key: str | None = None,
        target: str = MEMORY,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """POST through the edge with the canary's key, another key, or none (an empty string)."""
        secret = self.key if key is None else key
        authorization = {"Authorization": f"Bearer {secret}"} if secret else {}
        return self.edge.request(
            "POST", target, headers={**authorization, **(headers or {})}, body=body, timeout=EXCHANGE_TIMEOUT
        )

    def operation(self, name: str, arguments: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
        """The body of one memory operation for the canary."""
        return {"alias": self.canary["alias"], "operation": name, "arguments": arguments, **overrides}

    def rpc(self, method: str, parameters: Mapping[str, Any]) -> Any:
        """The result of one MCP call with the canary's key."""
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
        accept = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": MCP_VERSION}
        answer = self.post(call, target=MCP, headers=accept)
        body = asked(answer).json()
        if not isinstance(body, dict) or "result" not in body:
            raise CouldNotAsk(f"{method}: status {answer.status}, no result")
        return body["result"]


def upstream_client(layout: Layout, subject: release.Release) -> hindsight.Hindsight:
    """A client of Hindsight on its private address with the operator's key."""
    origin = subject.manifest["hindsight"]
    key = secretstore.read_source(layout.secrets / "store" / "hindsight-api-key") or ""
    return hindsight.Hindsight(Endpoint(origin["address"], origin["port"]), key)


def asked(answer: Answer) -> Answer:
    """`answer`, unless there was none."""
    if answer.status == 0:
        raise CouldNotAsk(answer.error)
    return answer


def refusal(answer: Answer) -> str:
    """Status and error type of a refusal, as one word pair."""
    return f"{asked(answer).status} {answer.error_type}".strip()


def run(context: Context, without: Collection[str] = ()) -> list[Verdict]:
    """Ask the gates of the release in its order, except those named in `without`."""
    verdicts = []
    for gate_id in (name for name in context.manifest["gates"] if name not in without):
        started = time.monotonic()
        known = GATES.get(gate_id)
        if known is None:
            verdicts.append(Verdict(gate_id, "", "a gate of this program", "unknown", "could-not-ask", 0))
            continue
        try:
            finding = known.ask(context)
            word = "pass" if finding.good else "fail"
        except UNANSWERED as error:
            finding, word = Finding("an answer", f"{type(error).__name__}: {error}"), "could-not-ask"
        latency = round((time.monotonic() - started) * 1000)
        verdicts.append(
            Verdict(gate_id, known.proves, finding.expected, finding.observed[:500], word, latency)
        )
    return verdicts


def failures(verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts that are no pass."""
    return [item for item in verdicts if item.verdict != "pass"]


def as_records(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """Verdicts as JSON objects."""
    return [asdict(item) for item in verdicts]


# --- identity ---------------------------------------------------------------------------------------------------------


@gate("running-images", "every container runs the image that the lock names")
def _running_images(context: Context) -> Finding:
    expected = dict(context.manifest["service_images"])
    return Finding(
        _words(expected), _words({name: item.image_reference for name, item in context.containers.items()})
    )


@gate("local-digests", "the engine holds those images under the digest of the lock, or a child of it")
def _local_digests(context: Context) -> Finding:
    images = context.manifest["images"]
    held = engine.inspect_images([image["reference"] for image in images.values()])
    strange = []
    for name, image in images.items():
        found = held[image["reference"]] or {}
        digests = {entry.split("@", 1)[1] for entry in found.get("RepoDigests", [])}
        if not digests & set(image["accepted_digests"]):
            strange.append(f"{name}: {sorted(digests) or 'absent'}")
    return Finding("no stranger", "; ".join(strange) or "no stranger")


@gate("containers-healthy", "every service runs and its health check passes")
def _containers_healthy(context: Context) -> Finding:
    expected = dict.fromkeys(context.manifest["service_images"], "running healthy")
    return Finding(
        _words(expected),
        _words({name: f"{item.status} {item.health}" for name, item in context.containers.items()}),
    )


@gate("schema-head", "the database is at the migration head of the locked Hindsight image")
def _schema_head(context: Context) -> Finding:
    return Finding(context.manifest["hindsight"]["migration_head"], database.state(context.compose).head)


@gate("api-version", "the Hindsight version of the lock answers")
def _api_version(context: Context) -> Finding:
    answer = asked(context.upstream.endpoint.request("GET", "/version"))
    return Finding(
        context.manifest["hindsight"]["api_version"], str((answer.json() or {}).get("api_version"))
    )


@gate("router-version", "the router version of the lock answers through the edge")
def _router_version(context: Context) -> Finding:
    client = {"name": "memoryctl", "version": "1"}
    result = context.rpc(
        "initialize", {"protocolVersion": MCP_VERSION, "capabilities": {}, "clientInfo": client}
    )
    return Finding(context.manifest["router"]["version"], result["serverInfo"]["version"])


@gate(
    "edge-certificate",
    "on every address and for every name the certificate is the declared one, or one that the declared authority issued",
)
def _edge_certificate(context: Context) -> Finding:
    settings = context.manifest["edge"]
    wrong = []
    for address in settings["bind_addresses"]:
        for name in settings["names"]:
            answer = replace(context.edge, address=address, server_name=name).request("GET", "/")
            if answer.status == 0 and not answer.error.startswith("SSLCertVerificationError"):
                raise CouldNotAsk(f"{address} {name}: {answer.error}")
            declared = settings["certificate_sha256"] or answer.certificate_sha256
            if answer.status == 0 or answer.certificate_sha256 != declared:
                wrong.append(f"{address} {name}: {answer.error or answer.certificate_sha256}")
    return Finding("as declared", "; ".join(wrong) or "as declared")


# --- exposure ---------------------------------------------------------------------------------------------------------


@gate("edge-paths", "the edge answers 404 to every target but the two, however it is spelled")
def _edge_paths(context: Context) -> Finding:
    key = {"Authorization": f"Bearer {context.key}"}
    open_targets = []
    for target in CLOSED_TARGETS:
        for method in ("GET", "POST"):
            answer = asked(
                context.edge.request(method, target, headers=key, body=b"" if method == "GET" else {})
            )
            if answer.status != 404:
                open_targets.append(f"{method} {target}: {answer.status}")
    return Finding("all closed", "; ".join(open_targets) or "all closed")


@gate("edge-methods", "the edge passes POST alone")
def _edge_methods(context: Context) -> Finding:
    key = {"Authorization": f"Bearer {context.key}"}
    answers = {
        f"{method} {target}": asked(context.edge.request(method, target, headers=key)).status
        for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS")
        for target in (MEMORY, MCP)
    }
    return Finding(_words(dict.fromkeys(answers, 404)), _words(answers))


@gate("upstream-no-key", "Hindsight itself refuses a call without its key")
def _upstream_no_key(context: Context) -> Finding:
    return Finding("401", str(asked(context.upstream.endpoint.request("GET", "/v1/default/banks")).status))


@gate("upstream-wrong-key", "Hindsight itself refuses a wrong key")
def _upstream_wrong_key(context: Context) -> Finding:
    wrong = hindsight.Hindsight(context.upstream.endpoint, "wrong-" + secrets.token_hex(16))
    return Finding("401", str(asked(wrong.call("GET", "/banks")).status))


@gate("upstream-key", "Hindsight accepts the key that the router holds")
def _upstream_key(context: Context) -> Finding:
    return Finding("200", str(asked(context.upstream.call("GET", "/banks?limit=1")).status))


@gate("upstream-mcp-off", "Hindsight's own MCP endpoint is off")
def _upstream_mcp_off(context: Context) -> Finding:
    endpoint = context.upstream.endpoint
    answers = [
        asked(endpoint.request("GET", "/mcp")).status,
        asked(endpoint.request("POST", "/mcp/", body={})).status,
    ]
    return Finding("[404, 404]", str(answers))


# --- authentication and limits ------------------------------------------------------------------------------------------


@gate("no-key", "a call without a key is refused")
def _no_key(context: Context) -> Finding:
    return Finding(
        "401 authentication_error", refusal(context.post(context.operation("recall", {"query": "x"}), key=""))
    )


@gate("wrong-key", "a call with an unknown key is refused")
def _wrong_key(context: Context) -> Finding:
    answer = context.post(context.operation("recall", {"query": "x"}), key="ask_" + secrets.token_urlsafe(32))
    return Finding("401 authentication_error", refusal(answer))


@gate("upstream-key-at-edge", "the operator's key opens nothing at the edge")
def _upstream_key_at_edge(context: Context) -> Finding:
    answer = context.post(context.operation("recall", {"query": "x"}), key=context.upstream.key)
    return Finding("401 authentication_error", refusal(answer))


@gate("master-token", "the router's master token opens no memory")
def _master_token(context: Context) -> Finding:
    token = secretstore.read_source(context.layout.secrets / "store" / "router-master-token") or ""
    answer = context.post(context.operation("recall", {"query": "x"}), key=token)
    return Finding("403 key_access_denied", refusal(answer))


@gate("mcp-no-key", "the MCP endpoint refuses a call without a key")
def _mcp_no_key(context: Context) -> Finding:
    answer = context.post({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, key="", target=MCP)
    return Finding("401 authentication_error", refusal(answer))


@gate("unknown-alias", "an alias that is not configured is not found")
def _unknown_alias(context: Context) -> Finding:
    answer = context.post(context.operation("recall", {"query": "x"}, alias="memory.no-such-alias"))
    return Finding("404 memory_not_found", refusal(answer))


@gate("chosen-bank", "a client cannot choose the bank of a fixed route")
def _chosen_bank(context: Context) -> Finding:
    answer = context.post(context.operation("recall", {"query": "x"}, bank="another-bank"))
    return Finding("422 invalid_request", refusal(answer))


@gate("extra-argument", "an argument that the contract does not know is refused")
def _extra_argument(context: Context) -> Finding:
    answer = context.post(context.operation("retain", {"content": "never stored", "async": True}))
    return Finding("422 invalid_request", refusal(answer))


@gate("large-body", "a body above 64 KiB is refused by the router, not cut by the edge")
def _large_body(context: Context) -> Finding:
    answer = context.post(context.operation("recall", {"query": "x" * 66_000}))
    return Finding("413 payload_too_large", refusal(answer))


# --- policy directory -----------------------------------------------------------------------------------------------------


@gate(
    "policy-directory",
    "the policy directory and its file have exactly the declared type, owner, group, mode and links",
)
def _policy_directory(context: Context) -> Finding:
    settings = context.manifest["policy"]
    directory = Path(settings["directory"])
    gid = settings["reader_gid"]
    expected = {"directory": f"directory 0750 0:{gid}", policy.FILE: f"file 0640 0:{gid} links 1"}
    observed = {"directory": _describe(directory), policy.FILE: _describe(directory / policy.FILE)}
    if settings["owner"] == "connect" and observed[policy.FILE] == "absent":
        expected.pop(policy.FILE)
        observed.pop(policy.FILE)
    return Finding(_words(expected), _words(observed))


@gate("policy-readable", "the router's user reads the policy and cannot write it")
def _policy_readable(context: Context) -> Finding:
    probe = (
        "import os\n"
        f"path = '/run/anvil-memory/{policy.FILE}'\n"
        "readable = not os.path.exists(path) or bool(open(path).read())\n"
        "writable = os.access(path, os.W_OK) or os.access('/run/anvil-memory', os.W_OK)\n"
        "print('uid', os.getuid(), 'readable', readable, 'writable', writable)\n"
    )
    observed = context.compose.exec(
        "router", ["python3", "-"], stdin=probe.encode(), gate="policy-readable"
    ).strip()
    return Finding(f"uid {context.manifest['router']['uid']} readable True writable False", observed)


# --- banks and defense ------------------------------------------------------------------------------------------------------


@gate("banks", "every bank that a route names exists and blocks sensitive content")
def _banks(context: Context) -> Finding:
    existing = context.upstream.banks()
    wrong = []
    for bank in context.manifest["banks"]:
        if bank not in existing:
            wrong.append(f"{bank}: absent")
        elif context.upstream.defense(bank) != hindsight.DEFENSE:
            wrong.append(f"{bank}: not defended")
    return Finding("all defended", "; ".join(wrong) or "all defended")


@gate("defense-blocks", "sensitive content is refused, and not echoed")
def _defense_blocks(context: Context) -> Finding:
    answer = context.post(context.operation("retain", {"content": f"The deploy token is {SENSITIVE}."}))
    echoed = SENSITIVE.encode() in answer.body
    return Finding("422 memory_rejected, echoed: False", f"{refusal(answer)}, echoed: {echoed}")


# --- the memory itself ------------------------------------------------------------------------------------------------------


@gate("retain", "a memory is stored through TLS, edge, router and Hindsight")
def _retain(context: Context) -> Finding:
    content = f"The readback left the marker {context.marker}."
    answer = asked(context.post(context.operation("retain", {"content": content, "tags": [context.marker]})))
    body = answer.json() or {}
    observed = f"{answer.status} {body.get('alias')} {(body.get('result') or {}).get('success')}"
    return Finding(f"200 {context.canary['alias']} True", observed)


@gate("recall", "the stored memory comes back")
def _recall(context: Context) -> Finding:
    arguments = {"query": f"Which marker did the readback leave: {context.marker}?", "tags": [context.marker]}
    texts: list[str] = []
    for _ in range(RECALL_ATTEMPTS):
        answer = asked(context.post(context.operation("recall", arguments)))
        if answer.status != 200:
            return Finding("the marker", refusal(answer))
        texts = [item["text"] for item in answer.json()["result"]["results"]]
        if any(context.marker in text for text in texts):
            return Finding("the marker", "the marker")
        time.sleep(0.3)
    return Finding("the marker", f"{len(texts)} memories without it")


@gate("mcp-tools", "MCP offers exactly the three memory tools, for the canary's alias alone")
def _mcp_tools(context: Context) -> Finding:
    tools = {
        tool["name"]: tool["inputSchema"]["properties"]["alias"]
        for tool in context.rpc("tools/list", {})["tools"]
    }
    aliases = {json.dumps(alias.get("enum")) for alias in tools.values()}
    expected = "memory_recall memory_reflect memory_retain for " + json.dumps([context.canary["alias"]])
    return Finding(expected, " ".join(sorted(tools)) + " for " + " and ".join(sorted(aliases)))


@gate("mcp-recall", "the stored memory comes back through MCP")
def _mcp_recall(context: Context) -> Finding:
    arguments = {
        "alias": context.canary["alias"],
        "query": f"Which marker did the readback leave: {context.marker}?",
        "tags": [context.marker],
    }
    result = context.rpc("tools/call", {"name": "memory_recall", "arguments": arguments})
    text = result["content"][0]["text"]
    found = json.loads(text).get("ok") is True and context.marker in text
    return Finding("the marker", "the marker" if found else text[:200])


@gate("worker", "the worker polls the queue under its stable name, and nothing waits for another one")
def _worker(context: Context) -> Finding:
    probe = (
        "import urllib.request\n"
        "print(urllib.request.urlopen('http://127.0.0.1:8889/health/live', timeout=5).read().decode())\n"
    )
    alive = json.loads(context.compose.exec("worker", ["python", "-"], stdin=probe.encode(), gate="worker"))
    polled = float(alive["seconds_since_last_poll"]) < WORKER_POLL_SECONDS
    strangers = database.query(
        context.compose,
        "select count(*) from public.async_operations where status = 'processing' and worker_id is distinct from "
        f"'{context.manifest['hindsight']['worker_id']}';",
    )
    return Finding("polls True, held by others 0", f"polls {polled}, held by others {strangers}")


@gate("no-secret-in-inspect", "no container shows a secret in its definition")
def _no_secret_in_inspect(context: Context) -> Finding:
    listed = [item.id for item in context.containers.values()]
    if not listed:
        raise CouldNotAsk("no container of the project exists")
    inspected = process.run(["docker", "inspect", *listed], timeout=engine.INSPECT_TIMEOUT).out
    shown = "\n".join(_strings(json.loads(inspected)))
    found = [path.name for path in _secret_files(context.layout) if path.read_text().strip() in shown]
    return Finding("none", ", ".join(found) or "none")


def _secret_files(layout: Layout) -> list[Path]:
    store = [path for path in (layout.secrets / "store").iterdir() if path.name != "fingerprint-key"]
    private_key = [path for path in (layout.secrets / "edge" / "tls.key",) if path.exists()]
    return sorted([*store, *layout.device_keys.glob("*.key"), *private_key])


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON document: a quoted secret does not hide behind its escapes."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _describe(path: Path) -> str:
    found = files.observed(path)
    if found is None:
        return "absent"
    info = path.lstat()
    if stat.S_ISDIR(info.st_mode):
        return f"directory {found}"
    return f"{'file' if stat.S_ISREG(info.st_mode) else 'other'} {found} links {info.st_nlink}"


def _words(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {values[name]}" for name in sorted(values))
