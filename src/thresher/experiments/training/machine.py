"""What else the machine does while a run is timed."""

import os


def is_busy() -> bool | None:
    """Returns whether more work is waiting than there are cores: the load average of the last minute is above their number.

    The work of all programs counts, also that of runs beside this one. None where the system has no load average.
    """
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
    return load > (os.cpu_count() or 1)
