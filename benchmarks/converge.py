#!/usr/bin/env python3
"""How long converging takes, against bare Compose of the same stack on the same host in the same run.

    benchmarks/converge.py [--repeat N]

Needs a sandbox that is up. Prints a table of medians and ratios: the no-op run of site.yml against a bare
`docker compose up -d --wait`, and a converge of an emptied host against a bare pull and up. It ends with the sandbox deployed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASE = "/var/lib/memory/current"
COMPOSE = (
    f"cd {RELEASE} && for v in $(grep -o 'MEMORY_SECRETS_[A-Z]*' compose.yaml | sort -u); do "
    "export $v=$(docker inspect -f '{{index .Config.Labels \"memory.secrets\"}}' "
    "$(docker ps -qf label=com.docker.compose.service=$(echo ${v#MEMORY_SECRETS_} | tr A-Z a-z | sed s/hindsight/api/))); done; "
)


def timed(*argv: str) -> float:
    """Seconds that a command takes; its failure ends the benchmark."""
    started = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)[:200]} failed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return time.monotonic() - started


def on_host(host: str, script: str) -> float:
    """Seconds that a shell script takes on the managed host."""
    return timed("docker", "exec", host, "bash", "-ec", script)


def remote_calls() -> int:
    """SSH executions of one no-op run."""
    done = subprocess.run(
        ["./scripts/sandbox", "playbook", "site.yml", "-vvv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return len(re.findall(r"SSH: EXEC", done.stdout))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs of each measurement (default: %(default)s)"
    )
    repeat = parser.parse_args().repeat
    host = f"{os.environ.get('MEMORY_SANDBOX', 'memory-sandbox')}-host"
    site = ("./scripts/sandbox", "playbook", "site.yml")

    def median(measure: Callable[[], float]) -> float:
        return statistics.median(measure() for _ in range(repeat))

    timed(*site)
    bare_noop = median(lambda: on_host(host, COMPOSE + "docker compose up -d --wait"))
    readback = median(lambda: on_host(host, "memoryctl readback"))
    noop = median(lambda: timed(*site))
    calls = remote_calls()

    empty = "docker ps -aq | xargs -r docker rm -f; docker image ls -q | xargs -r docker rmi -f; docker volume rm memory-postgres"
    save = COMPOSE + "export -p | grep MEMORY_SECRETS_ > /root/variables"
    bare_up = (
        f"cd {RELEASE}; . /root/variables; "
        "for i in $(grep -o 'registry[^\"]*@sha256:[0-9a-f]*' compose.yaml | sort -u); do docker pull -q $i; done; "
        "docker compose up -d --wait postgres embeddings; docker compose run --rm -T migrate; docker compose up -d --wait"
    )

    def bare_cold() -> float:
        on_host(host, empty)
        return on_host(host, bare_up)

    def cold() -> float:
        on_host(host, empty)
        return timed(*site)

    on_host(host, save)
    bare = bare_cold()
    converge = cold()
    print("| measurement | seconds | ratio |\n| --- | ---: | ---: |")
    print(f"| bare `docker compose up -d --wait`, nothing to do | {bare_noop:.1f} | 1 |")
    print(f"| readback of all gates alone | {readback:.1f} | {readback / bare_noop:.1f} |")
    print(f"| `site.yml`, nothing to do ({calls} remote calls) | {noop:.1f} | {noop / bare_noop:.1f} |")
    print(f"| bare pull, migrate and up, images in the registry | {bare:.1f} | 1 |")
    print(f"| `site.yml` on the emptied host | {converge:.1f} | {converge / bare:.2f} |")


if __name__ == "__main__":
    main()
