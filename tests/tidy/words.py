"""The glossary as data: what is banned, what to write instead, and where the ban does not hold.

`docs/internals/glossary.md` explains the words; `test_glossary` applies this list. An exception
names the place and the reason, and the test refuses one that excuses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedName:
    """A part of a name that we choose: `num` bans `num_hosts` and `NumHosts`."""

    part: str
    instead: str
    allowed_names: frozenset[str] = frozenset()
    """Whole names that keep a foreign word, because the foreign thing is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedProse:
    """A word in a comment, a docstring or a page. Foreign names are written `in backticks`."""

    pattern: str
    instead: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedCall:
    """A function that product code does not use, by its dotted name; `x.*` bans all of x."""

    name: str
    instead: str
    but_not: frozenset[str] = frozenset()
    """Names below `x.*` that are fine."""
    allowed: dict[str, str] = field(default_factory=dict[str, str])
    """Glob of files → why it may be used there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedRaise:
    """An exception that says nothing of who must act next.

    A `__post_init__` may raise anything: msgspec turns a `ValueError` there into an error that
    carries the path of the bad field.
    """

    name: str
    instead: str
    allowed: dict[str, str] = field(default_factory=dict[str, str])


NAMES = (
    BannedName(
        part="epoch",
        instead="`incarnation` for a gang start, `pass` for one round over a dataset",
    ),
    BannedName(
        part="generation",
        instead="`incarnation`",
        allowed_names=frozenset(
            {
                "generation",  # `metadata.generation` of a Kubernetes object.
                "if_generation_match",  # Google's precondition.
                "observed_generation",
            }
        ),
    ),
    BannedName(
        part="heartbeat",
        instead="`report`",
        allowed_names=frozenset(
            {"heartbeat_s", "heartbeat_timeout_s"}
        ),  # JAX's own, which we only set.
    ),
    BannedName(part="master", instead="`lead`"),
    BannedName(part="chief", instead="`lead`"),
    BannedName(part="launcher", instead="`agent` or `zygote`, whichever it is"),
    BannedName(part="dead", instead="`lost`"),
    BannedName(part="num", instead="`…_count`"),
    BannedName(part="ms", instead="`…_s`"),
    BannedName(part="millis", instead="`…_s`"),
    BannedName(part="secs", instead="`…_s`"),
    BannedName(part="mgr", instead="the verb that it does"),
    BannedName(part="manager", instead="the verb that it does"),
    BannedName(part="helper", instead="what it helps with"),
    BannedName(part="util", instead="what it does"),
    BannedName(part="utils", instead="what it does"),
)

PROSE = (
    BannedProse(
        pattern=r"epochs?",
        instead="`incarnation` for a gang start, `pass` for one round over a dataset",
    ),
    BannedProse(pattern=r"restart counts?", instead="`incarnation`"),
    BannedProse(pattern=r"attempt numbers?", instead="`incarnation`"),
    BannedProse(pattern=r"masters?", instead="`lead`"),
    BannedProse(pattern=r"launchers?", instead="`agent` or `zygote`, whichever it is"),
    BannedProse(pattern=r"dead (?:host|slice|worker|agent)s?", instead="`lost`"),
    BannedProse(pattern=r"kill(?:s|ed|ing)? (?:an? |the )?old incarnation", instead="`fence`"),
    BannedProse(pattern=r"(?:save|dump)s? files?", instead="`checkpoint` or `snapshot`"),
    BannedProse(pattern=r"uncommitted checkpoints?", instead="`draft`"),
)

_DRIVER = "a driver: it reads the time and hands it on as an argument"

CALLS: tuple[BannedCall, ...] = (
    BannedCall(
        name="time.*",
        instead="take `now_s` as an argument, or a `Clock`",
        # A pause within a wait decides nothing, and the pure rooms cannot import `time` at all.
        but_not=frozenset({"time.sleep"}),
        allowed={
            "runtime/everstep/runtime/clock.py": "the one reader of time in the runtime",
            "controller/everstep/controller/ops/clock.py": "the one reader in the controller",
            "controller/everstep/controller/cli/**": _DRIVER,
        },
    ),
    BannedCall(name="datetime.datetime.now", instead="take `now_s` as an argument"),
    BannedCall(name="datetime.datetime.utcnow", instead="take `now_s` as an argument"),
    BannedCall(name="datetime.datetime.today", instead="take `now_s` as an argument"),
    BannedCall(
        name="random.*",
        instead="take what chance decided as an argument",
        allowed={
            "controller/everstep/controller/cli/demo/story.py": "draws a story from the seed",
        },
    ),
    BannedCall(
        name="numpy.random.*",
        instead="a generator made from a key",
        but_not=frozenset({"numpy.random.Generator", "numpy.random.Philox"}),
    ),
    BannedCall(
        name="secrets.*",
        instead="take the token as an argument",
        allowed={
            "controller/everstep/controller/ops/clock.py": "the one source of chance",
            "runtime/everstep/runtime/backoff.py": "a wait that others do not share",
            "runtime/everstep/runtime/checkpoint/commit.py": "tells two writers of a draft apart",
            "runtime/everstep/runtime/storage/datafiles.py": "names of data files",
            "runtime/everstep/runtime/restore/exchange.py": "the key to one exchange's door",
            "runtime/everstep/runtime/storage/dataobjects.py": "names of data objects",
            "runtime/everstep/runtime/storage/posix.py": "names of temporary files",
            "runtime/everstep/runtime/storage/tensors.py": "the id that a database must have",
            "runtime/everstep/runtime/testing/local_slices.py": "plays the controller",
        },
    ),
    BannedCall(
        name="uuid.*",
        instead="take the id as an argument",
        allowed={"controller/everstep/controller/ops/clock.py": "the one source of chance"},
    ),
    BannedCall(name="os.urandom", instead="take the bytes as an argument"),
    BannedCall(name="os.system", instead="`subprocess` with a list of arguments"),
    BannedCall(name="pickle.*", instead="`msgspec`, which runs nothing that it reads"),
    BannedCall(name="warnings.warn", instead="the log, or an error"),
)

RAISES: tuple[BannedRaise, ...] = (
    BannedRaise(name="Exception", instead="a subclass of `EverstepError`"),
    BannedRaise(name="RuntimeError", instead="a subclass of `EverstepError`"),
    BannedRaise(name="AssertionError", instead="`check`, or `InvariantViolated` itself"),
    BannedRaise(
        name="ValueError",
        instead="`ConfigurationError`, which carries the field's path",
    ),
)
