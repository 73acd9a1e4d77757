"""Plant a fault into a small recipe, 35 times, and count how often `samebits check` finds it and names its cause.

python -m benchmarks.check_faults             # all of them, and a recipe without a fault: 10 minutes on 2 idle cores
python -m benchmarks.check_faults clock set   # only those whose name contains one of the words
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.check_faults import FAULTS, check, verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", default=[""], help="only faults whose names contain one of these")
    words = parser.parse_args().words
    chosen = [fault for fault in FAULTS if any(word in fault.name for word in words)]
    found = named = 0
    print(f"{'fault':<58}  found  cause  seconds")
    for fault in chosen:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            report = check(fault, Path(folder))
        is_found, is_named = verdict(fault, report)
        found, named = found + is_found, named + is_named
        row = f"{fault.name:<58}  {'yes' if is_found else 'NO':<5}  {'yes' if is_named else 'NO':<5}"
        print(f"{row}  {time.monotonic() - began:5.1f}", flush=True)
        if not is_named:
            print(f"    {report.get('error') or json.dumps(report['findings'])}", flush=True)
    print(f"{found} of {len(chosen)} found, {named} with the cause")
    return 0 if found == named == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
