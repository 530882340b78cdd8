"""What is made of the times of all sides: medians beside medians, and what they should be."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from benchmarks.checkpoint_cases import ELSEWHERE, MIB, Case
from benchmarks.figures import Figure, compared, reaching

Samples = dict[str, list[float]]
TIMES = ("save", "restore", "cold restore")

WORDS = {
    "bare": "bare files",
    "orbax": "Orbax",
    "orbax_best": "Orbax, uncompressed",
    "torch": "torch DCP",
}


def figures_of(case: Case, samples: Mapping[str, Samples], load: str) -> Iterator[Figure]:
    """The figures of a case; ratios of times are the other's over ours, so more is better.

    Args:
        case: that was measured.
        samples: by side and measure; seconds, or bytes.
        load: of the machine before it began.
    """
    for figure in _figures(case, samples):
        yield msgspec.structs.replace(figure, case=case.key, load=load)


def _figures(case: Case, samples: Mapping[str, Samples]) -> Iterator[Figure]:
    ours = samples["everstep"]
    for measure in TIMES:
        if measure not in ours:
            continue
        for other, reach in _reaches(case, measure):
            if other in samples:
                yield _faster(f"{case.name}: {measure}", ours, samples, other, reach)
    if case.size_bytes >= MIB and "bare" in samples:
        kept = compared(
            f"{case.name}: save keeps the caller",
            statistics.median(ours["kept"]),
            "s",
            against="plain copy into touched memory",
            against_value=statistics.median(samples["bare"]["kept"]),
        )
        yield reaching(kept, "≤ 1.3", (kept.ratio or 0) <= 1.3)
    if case.size_bytes < MIB:
        yield from _small_figures(case, samples)
    if case.is_moved:
        for layout in (*ELSEWHERE, "one process"):
            yield from _layout_figures(case, layout, samples)
    if case.processes == 1 and case.size_bytes >= 64 * MIB:
        for measure in ("save", "restore"):
            peak = max(ours[f"{measure} peak"])
            yield reaching(
                compared(
                    f"{case.name}: {measure}, peak memory above before",
                    peak,
                    "bytes",
                    against="the state",
                    against_value=case.size_bytes,
                ),
                "≤ state + 256 MiB",
                peak <= case.size_bytes + 256 * MIB,
            )


def _reaches(case: Case, measure: str) -> Sequence[tuple[str, float]]:
    if case.size_bytes < MIB:
        return ()
    if case.leaves >= 2000:
        return (("orbax", 5.0), ("orbax_best", 0.0), ("torch", 0.0), ("bare", 0.0))
    if measure == "save" and case.place == "disk":
        return (("orbax", 1.0), ("orbax_best", 1.0), ("torch", 1.0), ("bare", 0.85))
    if measure == "save":
        return (("orbax", 5.0), ("orbax_best", 1.3), ("torch", 1.3), ("bare", 0.0))
    return (("orbax", 3.0), ("orbax_best", 1.5), ("torch", 1.2), ("bare", 0.8))


def _faster(
    name: str, ours: Samples, samples: Mapping[str, Samples], other: str, reach: float
) -> Figure:
    measure = name.rsplit(": ", 1)[1]
    value, against = statistics.median(ours[measure]), statistics.median(samples[other][measure])
    ratio = against / value
    return Figure(
        name=name,
        value=value,
        unit="s",
        against=WORDS[other],
        against_value=against,
        ratio=ratio,
        measure=measure,
        reach=f"≥ {reach:g} ×" if reach else None,
        holds=ratio >= reach if reach else None,
    )


def _small_figures(case: Case, samples: Mapping[str, Samples]) -> Iterator[Figure]:
    for measure, words, reach_s in (
        ("kept", "save keeps the caller", 5e-3),
        ("save", "save", 40e-3),
        ("restore", "restore", 40e-3),
    ):
        value = statistics.median(samples["everstep"][measure])
        yield reaching(
            compared(
                f"{case.name}: {words}",
                value,
                "s",
                against="Orbax",
                against_value=statistics.median(samples["orbax"][measure]),
            ),
            f"≤ {reach_s * 1e3:g} ms",
            value <= reach_s,
        )


def _layout_figures(case: Case, layout: str, samples: Mapping[str, Samples]) -> Iterator[Figure]:
    measure = f"restore as {layout}"
    ours, theirs = samples["everstep"], samples["orbax"]
    read, others = (
        statistics.median(side[f"{measure}, bytes read"]) / case.size_bytes
        for side in (ours, theirs)
    )
    name = f"{case.name}, saved as rows: {measure}"
    yield reaching(
        compared(
            f"{name}, bytes read of the state's", read, "", against="Orbax", against_value=others
        ),
        "≤ 1.05",
        read <= 1.05,
    )
    took_s, same_s = statistics.median(ours[measure]), statistics.median(ours["restore"])
    time = compared(f"{name}, time", took_s, "s", against="the same layout", against_value=same_s)
    # Whole on every process is as many times the bytes in memory.
    yield time if layout == "whole" else reaching(time, "≤ 1.5", took_s <= 1.5 * same_s)
    for other in ("orbax", "orbax_best"):
        yield _faster(name, ours, samples, other, 0.0)
