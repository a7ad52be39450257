#!/usr/bin/python
"""Ansible module that runs a command of the host program."""

from __future__ import annotations

DOCUMENTATION = r"""
module: memoryctl
short_description: Run a command of the memory host program
description:
  - Runs one command of memoryctl on the managed host. The program travels with the module, so that controller and host
    always agree, also before anything is installed there.
options:
  command:
    description: Name of the command.
    type: str
    required: true
    choices: [paths, images, secrets, material, policy, keys, stage, activate, readback, rollback, guard, status, teardown]
  given:
    description: Input of the command. It holds no secret.
    type: dict
    default: {}
  secret_values:
    description: Secrets by name, for the commands C(secrets) and C(material). An empty value means that the host generates one.
    type: dict
    default: {}
  state_dir:
    description: State directory on the host.
    type: path
    default: /var/lib/memory
  etc_dir:
    description: Configuration directory on the host.
    type: path
    default: /etc/memory
  checked:
    description: Whether the checks before the first change have run; C(site.yml) passes what it knows.
    type: bool
    default: true
attributes:
  check_mode:
    description: Reports what would change and changes nothing.
    support: full
  diff_mode:
    description: Shows the rendered release; secrets are never part of it.
    support: full
author: memory deployment bundle
"""

EXAMPLES = r"""
- name: Read back the live release
  memoryctl:
    command: readback
"""

RETURN = r"""
changes:
  description: What changed, or in check mode would change.
  returned: always
  type: list
  elements: str
refused:
  description: Why the commands C(secrets) and C(material) changed nothing. The task itself succeeds, so that it may hide its output.
  returned: refusal
  type: str
gate:
  description: Name of the check that refused.
  returned: failure
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.memoryctl import commands
from ansible.module_utils.memoryctl.errors import Refused


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "command": {"type": "str", "required": True, "choices": sorted(commands.COMMANDS)},
            "given": {"type": "dict", "default": {}},
            "secret_values": {"type": "dict", "default": {}, "no_log": True},
            "state_dir": {"type": "path", "default": "/var/lib/memory"},
            "etc_dir": {"type": "path", "default": "/etc/memory"},
            "checked": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    if not module.params["checked"]:
        module.fail_json(
            msg="The checks of memory_preflight did not run before this task. A setting that cannot work would be found "
            "half-way through a change. Fix: run the whole of playbooks/site.yml, from its first task."
        )
    directories = {name: module.params[name] for name in ("state_dir", "etc_dir")}
    given = dict(module.params["given"])
    if module.params["command"] in ("secrets", "material"):
        given["given"] = module.params["secret_values"]
    try:
        result = commands.call(module.params["command"], directories, given, module.check_mode)
    except Refused as error:
        if module.params["command"] in ("secrets", "material"):
            # Tasks with secrets hide what they print; the next task shows this text, which holds no secret.
            module.exit_json(changed=False, refused=error.text())
        module.fail_json(msg=error.text(), gate=error.gate, exit_code=int(error.code))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
