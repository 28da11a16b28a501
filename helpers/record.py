"""Re-run the notebooks and keep what they show: `python -m helpers.record [NUMBER ...]`.

The executed notebooks replace those in notebooks/, in a normal form that leaves a diff worth
reading, and the numbers that they recorded go to data/measurements/<device>.json; those of the
reference machine renew the verdicts of data/lecture_map.csv. Nothing is injected into a notebook:
the profile is full, or that of the environment variable LECTURES_PROFILE.
"""

import argparse
import datetime
import os
import shutil
import sys
from pathlib import Path

import nbformat

from helpers import colab
from helpers.normalise import ROOT, normalise


class Refused(Exception):
    """Nothing was written; the message says why in one sentence."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="helpers.record", description=__doc__.split(":")[0] + ".")
    add = parser.add_argument
    add("chosen", nargs="*", metavar="NOTEBOOK", help="number or name (default: all)")
    add("--keep-going", action="store_true", help="when some fail, record the others all the same")
    add(
        "--normalise-only",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="run nothing: bring these notebooks, edited by hand, into the normal form",
    )
    add("--notebooks", type=Path, metavar="DIR", default=ROOT / "notebooks")
    return parser.parse_args(arguments)


def rewrite(source: Path, target: Path) -> None:
    """Write the normal form of one notebook file to another, or to itself; never half of it."""
    notebook = normalise(nbformat.read(source, as_version=4))
    colab.refresh(notebook, target.name, colab.repository())
    partial = target.with_suffix(".partial")
    nbformat.write(notebook, partial)
    os.replace(partial, target)


def check_profiles(records: list[dict], slug: str) -> None:
    """Refused when a GPU's file would get numbers that were not measured at full size."""
    small = sorted({record["notebook"] for record in records if record["profile"] != "full"})
    if slug != "cpu" and small:
        raise Refused(f"{', '.join(small)}: numbers of a GPU are recorded at full size only")


def keep(run: Path, stems: list[str], notebooks: Path, slug: str) -> Path:
    """Put the finished notebooks and the records of a run in their places.

    Returns the file of the records. Refused (`check_profiles`) before anything is written.
    """
    from helpers import results

    new = [r for stem in stems for r in results.load(run / "records" / f"{stem}.json")]
    check_profiles(new, slug)
    measurements = results.measurements_path(slug)
    for stem in stems:
        rewrite(run / f"{stem}.ipynb", notebooks / f"{stem}.ipynb")
    if new:
        results.save(results.merge(results.load(measurements), new), measurements)
    for stem in stems:
        for curve in sorted((run / "records").glob(f"{stem}.*.csv")):
            shutil.copyfile(curve, measurements.with_name(f"{slug}.{curve.name}"))
    return measurements


def record(chosen: list[str], notebooks: Path, keep_going: bool) -> int:
    """Run the chosen notebooks and keep the results. Returns the exit status, as `helpers.run`."""
    from helpers import device, results, run, run_folder, verdicts

    os.environ.setdefault("LECTURES_PROFILE", "full")
    slug, profile = device.slug(), device.profile()
    if slug == results.REFERENCE:
        os.environ["LECTURES_PROGRESS"] = ""  # nobody's
        os.environ["LECTURES_REFERENCE"] = ""  # its own past is not what it is compared with
    if slug != "cpu" and profile != "full":
        raise Refused(f"LECTURES_PROFILE is {profile}: numbers of a GPU are recorded at full size")
    folder = ROOT / "runs" / f"recorded-{slug}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
    exit_status = run.main([*chosen, "--output", str(folder), "--notebooks", str(notebooks)])
    if exit_status == 2 or not folder.exists():  # refused: the runner said why
        return exit_status
    entries = run_folder.read_status(folder)["notebooks"]
    good = [stem for stem, entry in entries.items() if entry["status"] == "passed"]
    bad = [stem for stem in entries if stem not in good]
    if bad and not keep_going:
        raise Refused(
            f"nothing was recorded, because these did not pass: {', '.join(bad)} "
            f"(--keep-going records the others)"
        )
    measurements = keep(folder, good, notebooks, slug)
    if good and slug == results.REFERENCE:
        verdicts.rewrite()
    print(f"Recorded {', '.join(good) or 'nothing'}; numbers in {measurements}")
    return exit_status


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 1 (failed or refused), 2 (usage), 130."""
    options = parse(arguments)
    try:
        if options.normalise_only:
            for file in options.normalise_only:
                rewrite(file, file)
            return 0
        return record(options.chosen, options.notebooks, options.keep_going)
    except (Refused, ValueError, OSError) as refusal:
        print(f"helpers.record: {refusal}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
