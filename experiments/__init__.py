"""The commands. Only this package defines flags. `python -m experiments.NAME` runs a command, also of a subfolder."""

import sys

GROUPS = ("analysis", "contextual", "files")
__path__ += [f"{__path__[0]}/{group}" for group in GROUPS]

if sys.argv[:1] == ["-m"]:  # Python is starting a command, whose imports take seconds.
    from experiments.cli import interrupts

    interrupts.install()
