"""Downloads a repository of a hub, which may not know it yet: `download.py ENDPOINT TOKEN REPO FOLDER`."""

import json
import sys
import time

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

DEADLINE_S = 60
endpoint, token, repo, folder = sys.argv[1:]
begun = time.monotonic()
while True:
    try:
        snapshot_download(repo, endpoint=endpoint, token=token, local_dir=folder)
        break
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        if time.monotonic() - begun > DEADLINE_S:
            raise
        time.sleep(0.05)
print(json.dumps({"event": "downloaded"}), flush=True)
