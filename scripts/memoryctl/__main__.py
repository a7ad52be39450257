"""Command line of memoryctl: `python3 -m memoryctl readback|status|rollback|activate RELEASE`."""

from __future__ import annotations

import argparse
import sys

from . import commands
from .errors import Exit, Refused
from .layout import DEFAULT_ETC, DEFAULT_STATE

VERBS = {
    "readback": "ask every gate of the current release",
    "status": "what runs, since when, of which release",
    "rollback": "go back to the release committed before the current one",
    "guard": "bring back an activation whose run has died (the guard's timer calls this)",
    "activate": "activate a staged release, or prove that it is live",
}


def parser() -> argparse.ArgumentParser:
    """The command line. `--json` may stand before or after the verb."""
    top = argparse.ArgumentParser(prog="memoryctl", description="Operate the memory service of this host.")
    top.add_argument("--state-dir", default=str(DEFAULT_STATE), help="state directory (default: %(default)s)")
    top.add_argument(
        "--etc-dir", default=str(DEFAULT_ETC), help="configuration directory (default: %(default)s)"
    )
    top.add_argument("--json", action="store_true", help="print one JSON document")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document"
    )
    verbs = top.add_subparsers(dest="verb", required=True)
    for verb, purpose in VERBS.items():
        command = verbs.add_parser(verb, help=purpose, parents=[output])
        if verb == "activate":
            command.add_argument("release", help="id of the release (a directory below STATE/releases)")
    return top


def text(verb: str, result: commands.Data) -> str:
    """Result for a person."""
    if verb == "status":
        lines = [
            f"release {result['release'] or 'none'}, committed {result['committed_at'] or 'never'}",
            f"last change: {result['state'] or 'none'}"
            + (f" ({result['reason']})" if result["reason"] else ""),
        ]
        if result["armed_for"]:
            lines.append(f"an activation of {result['armed_for'][:12]} is running, and guarded")
        if result["closed"]:
            lines.append("the edge is closed: it answers 503")
        lines += [
            f"  {name:<11} {item['status']} {item['health']} since {item['since'][:19]}Z"
            for name, item in result["services"].items()
        ]
        return "\n".join(lines)
    if verb == "guard":
        return f"unfinished activation: {result['ended']}" if result["ended"] else "nothing to bring back"
    lines = [
        f"{item['verdict']:<14} {item['id']:<22} {item['latency_ms']:>6} ms  {item['proves']}"
        for item in result["gates"]
    ]
    lines += [
        f"  {item['id']}: expected {item['expected']}, observed {item['observed']}"
        for item in result["gates"]
        if item["verdict"] != "pass"
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = parser().parse_args(arguments)
    directories = {"state_dir": options.state_dir, "etc_dir": options.etc_dir}
    given = {"release": options.release} if options.verb == "activate" else {}
    try:
        result = commands.call(options.verb, directories, given, check=False)
    except Refused as error:
        print(error.text(), file=sys.stderr)
        return int(error.code)
    print(commands.to_json(result) if options.json else text(options.verb, result))
    if options.verb == "readback" and not result["passed"]:
        asked = any(item["verdict"] == "fail" for item in result["gates"])
        return int(Exit.FAILED if asked else Exit.COULD_NOT_ASK)
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main())
