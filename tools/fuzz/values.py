"""Odd values: words, things that are no plain file, and environment variables."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

JUNK = (
    *"x 0 -1 1 3 2.5 nan inf -inf 1e400 1e30 2147483648 None True [] () (1, {'a':1} ' a,b a=b".split(),
    *"../.. /dev/null ü☃ %s%n --------- cope quick rope+ gs:// gs://bucket-503/x".split(),
    *"http://x/y ~/x 😀 ٣ Ⅷ ½ １２ ٣.٥ 1_000 0x10 −3 +5 lr[1e-3] a*b? ** a\\b $(x) `x` {0}".split(),
    *"%d -- = . .. / // /proc/self/mem /proc/self/fd/99 /dev/full 1e-400 1e9999999999".split(),
    *"""~root CON a;b a|b a#b a:b 'a" <b> - # @x file:///x cope(gate=x) rope(base=nan)""".split(),
    *("", " ", " 7 ", "a\nb", "\r", "\t", "\x7f", "\u2028", "\ufeff", "\u202eabc", "e\u0301"),
    *("\udcff\udcfe", "\udcc3", "\x01\x1b[31m", "\x1b]0;x\x07", "{'a': 1}"),
    *("x" * 256, "x" * 3000, "é" * 200, "a/" * 2500, "9" * 30, "9" * 400),
)
"""Parts of values and names; a surrogate stands for a byte that is not UTF-8."""
NEVER = ("nan", "inf", "-inf", "1e400", "2147483648", "9" * 30)
"""Values that no number of a config or flag has; some fields may be as large as the last two."""
JSON = (None, True, 0, -1, 2.5, 1e300, 10**30, "", "x", [], {}, [[]], [None], {"x": 1}, "x" * 5000)
"""Values of a damaged JSON file."""

THINGS: dict[str, Callable[[Path, Path], object]] = {
    "a pipe": lambda path, right: os.mkfifo(path),
    "a socket": lambda path, right: os.mknod(path, 0o600 | stat.S_IFSOCK),
    "a folder": lambda path, right: path.mkdir(),
    "a file": lambda path, right: path.write_text("file"),
    "an empty file": lambda path, right: path.touch(),
    "a file that is not UTF-8": lambda path, right: path.write_bytes(b"\xff\xfe\x00word"),
    "a link to itself": lambda path, right: path.symlink_to(path.name),
    "a link to nothing": lambda path, right: path.symlink_to("nothing"),
    "a loop of folders": lambda path, right: (path.mkdir(), (path / "up").symlink_to("..")),
    "a copy": lambda path, right: (shutil.copytree if right.is_dir() else shutil.copy)(right, path),
    "a link to the right one": lambda path, right: path.symlink_to(right),
    "a device": lambda path, right: path.symlink_to("/dev/full"),
    "nothing": lambda path, right: None,
}
"""Things that may be at a path, as a function of the path and of the right file or folder."""
VARIABLES = {
    "COLUMNS": ("0", "1", "-5", "x", "9" * 20),
    "TERM": ("dumb", "", "no-such"),
    "HOME": ("", "/no/such", "/dev/null"),
    "XDG_CACHE_HOME": ("/dev/null", "relative", "/no/such"),
    "TMPDIR": ("/no/such", "/dev/null"),
    "TZ": ("", "No/Such", "\x01"),
    "LC_ALL": ("C", "ja_JP.eucJP", "no_such"),
    "MPLBACKEND": ("no_such", ""),
    "JAX_PLATFORMS": ("", "cpu,no_such"),
    "OMPI_COMM_WORLD_SIZE": ("٣", "x", "1"),
}
"""Environment variables; those that Python and libraries read when loaded have no effect."""
