"""Print what this image contains, as JSON; run inside the image."""

import json
import os
import sqlite3
import subprocess
from pathlib import Path

config = Path("/tmp/config.toml")
store = Path("/tmp/keys/keys.sqlite3")
config.write_text(f'[server]\nauth_env = "UNUSED"\napi_keys_path = "{store}"\n')
version = subprocess.run(["anvil-serving", "--version"], check=True, capture_output=True, text=True).stdout
subprocess.run(
    ["anvil-serving", "router", "keys", "init", "--config", str(config)], check=True, capture_output=True
)
with sqlite3.connect(store) as database:
    schema = database.execute("PRAGMA user_version").fetchone()[0]
print(
    json.dumps(
        {
            "uid": os.getuid(),
            "gid": os.getgid(),
            "anvil_serving_version": version.split()[-1],
            "key_schema_version": schema,
        }
    )
)
