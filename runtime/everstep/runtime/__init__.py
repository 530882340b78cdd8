"""The runtime: what runs on each host beside and inside the user's training.

`import everstep.runtime as es` is the user's door.
"""

from everstep.runtime._version import __version__

__all__ = ["__version__"]
