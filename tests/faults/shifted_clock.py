"""The samebits command on a machine with a wrong clock: shifted_clock.py [unchecked] SECONDS train ...

unchecked: as if the clocks had been right when they were compared.
"""

import datetime
import sys
import time

if __name__ == "__main__":
    is_unchecked = sys.argv[1] == "unchecked" and bool(sys.argv.pop(1))
    shift_s = float(sys.argv.pop(1))
    _now, _datetime = time.time, datetime.datetime

    class Shifted(datetime.datetime):
        """What torch's rendezvous keeps signs of life with."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return _datetime.now(tz) + datetime.timedelta(seconds=shift_s)

    time.time = lambda: _now() + shift_s  # type: ignore[assignment]
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from samebits.cli.main import main
    from samebits.launch.nodes import clocks

    dynamic_rendezvous.datetime = Shifted  # type: ignore[misc]
    if is_unchecked:
        clocks.check = lambda *_: None
    main()
