"""Old names of flags, which work for one release."""

import sys

from absl import flags


class _OldName(flags.Flag):  # type: ignore[type-arg]  # absl's class has no parameters when it runs
    """A flag that sets another one, and says so."""

    def __init__(self, old: str, new: str, values: flags.FlagValues):
        super().__init__(flags.ArgumentParser(), None, old, None, f"Old name of --{new}.")
        self._new, self._values = new, values

    def parse(self, argument: str) -> None:
        print(f"warning: --{self.name} is now --{self._new}; the old name goes with the next release", file=sys.stderr)
        flag = self._values[self._new]
        flag.parse(",".join([*flag.value, argument]) if flag.present and isinstance(flag.value, list) else argument)
        flag.using_default_value = False


def renamed(old: str, new: str, values: flags.FlagValues = flags.FLAGS) -> None:
    """Lets --OLD stand for --NEW, which is defined, with a line on stderr; of a list each old name adds to it."""
    flags.DEFINE_flag(_OldName(old, new, values), values, module_name=__name__)
