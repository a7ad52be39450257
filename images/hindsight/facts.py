"""Print what this image contains, as JSON; run inside the image."""

import json
import logging
import os
from pathlib import Path

import hindsight_api
from alembic.config import Config
from alembic.script import ScriptDirectory

logging.disable(logging.CRITICAL)

config = Config()
config.set_main_option("script_location", str(Path(hindsight_api.__file__).with_name("alembic")))
head = ScriptDirectory.from_config(config).get_current_head()
print(
    json.dumps(
        {
            "uid": os.getuid(),
            "gid": os.getgid(),
            "api_version": hindsight_api.__version__,
            "migration_head": head,
        }
    )
)
