"""The samebits command on a machine with a wrong clock: shifted_clock.py SECONDS train ..."""

import sys
import time

if __name__ == "__main__":
    shift_s = float(sys.argv.pop(1))
    _now = time.time
    time.time = lambda: _now() + shift_s  # type: ignore[assignment]

    from samebits.cli.main import main

    main()
