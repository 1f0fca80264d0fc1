"""Runs benchmarks by name and prints them as a table or as JSON.

A benchmark lives in a module of this folder that has a table `BENCHMARKS`: a function by
name, which yields measurements. What can't run here says why and is left out.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import TYPE_CHECKING

import agent_benchmarks
import broker_benchmarks
import datapath_benchmarks
import directory_benchmarks
import gateway_benchmarks
import kernel_benchmarks
from measurement import Measurement, SkippedError, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BENCHMARKS: dict[str, Callable[[], Iterator[Measurement]]] = {
    **kernel_benchmarks.BENCHMARKS,
    **datapath_benchmarks.BENCHMARKS,
    **gateway_benchmarks.BENCHMARKS,
    **agent_benchmarks.BENCHMARKS,
    **broker_benchmarks.BENCHMARKS,
    **directory_benchmarks.BENCHMARKS,
}
HEADINGS = ("NAME", "OURS", "PEER", "PEER IS", "RATIO", "UNIT", "NOTE")


def main() -> int:
    """Run what was asked for. 0 fine, also when something was skipped; 2 an unknown name."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--json", action="store_true", help="one list of objects on stdout, nothing else there")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As Ctrl-C does: whatever a benchmark has open is closed on the way out.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    found = list(measure(options.names or list(BENCHMARKS)))
    if options.json:
        print(json.dumps([measurement.to_json() for measurement in found], indent=2))
    elif found:
        print_table([HEADINGS, *(measurement.to_row() for measurement in found)])
    return 0


def measure(names: Sequence[str]) -> Iterator[Measurement]:
    """Yield the measurements of benchmarks, each as soon as it is there."""
    for name in names:
        try:
            yield from BENCHMARKS[name]()
        except SkippedError as reason:
            sys.stderr.write(f"bench: {name} is skipped: {reason}\n")
        finally:
            progress("")


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
