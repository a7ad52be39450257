"""Host program of the memory deployment bundle.

Standard library only: it must work on the host when pip, the registry and the controller are gone. Ansible calls
the functions of `commands` through one module, operators and systemd units call `python3 -m memoryctl`.
"""
