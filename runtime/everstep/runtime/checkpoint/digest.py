"""SHA-256 of every leaf of the newest checkpoint: two runs can be compared without their data.

`python -m everstep.runtime.checkpoint.digest URI` prints
`{"step": 160, "leaves": {"params['w']": "…"}}` on one line. Reading verifies each byte (G9).
"""

from __future__ import annotations

import hashlib
import json
import sys

from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.errors import ConfigurationError, EverstepError
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.reader import CheckpointReader, read_leaf


def digest_newest(uri: str) -> tuple[int, dict[str, str]]:
    """Digest the newest committed step of a run.

    Args:
        uri: of the run's folder.

    Returns:
        The step, and a digest by leaf name. Leaves without bytes are digested by kind and value.

    Raises:
        ConfigurationError: nothing is committed there.
        CheckpointInvalid: it is damaged; names the leaf.
    """
    store = open_store(uri)
    commits = list_commits(store)
    if not commits:
        raise ConfigurationError("URI", uri, "the folder of a run with a committed step")
    reader = CheckpointReader(store, commits[-1])
    leaves: dict[str, str] = {}
    for index, leaf in enumerate(reader.tree.leaves):
        if leaf.is_stored_as_bytes:
            content = read_leaf(reader, index).tobytes()
        else:
            content = f"{leaf.kind.value} {leaf.value}".encode()
        leaves[leaf.name] = hashlib.sha256(content).hexdigest()
    return commits[-1].step, leaves


def main() -> int:
    """Print the digests; 1 and one line on standard error when there are none to be had."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m everstep.runtime.checkpoint.digest URI\n")
        return 2
    try:
        step, leaves = digest_newest(sys.argv[1])
    except EverstepError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps({"step": step, "leaves": leaves}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
