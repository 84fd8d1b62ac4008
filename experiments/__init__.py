"""The commands: the only place with flags. `python -m experiments.NAME` finds a command in any group below."""

import sys

GROUPS = ("analysis", "contextual", "files")
__path__ += [f"{__path__[0]}/{group}" for group in GROUPS]

if sys.argv[:1] == ["-m"]:  # Python is starting a command, and importing it takes seconds.
    from experiments.cli import interrupts

    interrupts.install()
