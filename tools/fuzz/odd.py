"""Odd words, things that are no plain file, and environment variables."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

ODD = (
    "\u202eabc",
    "e\u0301",
    "😀",
    "\udcff\udcfe",
    "\x1b]0;x\x07",
    "\r",
    "\t",
    "\u2028",
    "\ufeff",
    "٣",
    "Ⅷ",
    "½",
    "１２",
)
ODD += (
    "1_000",
    "0x10",
    "−3",
    "+5",
    " 7 ",
    "lr[1e-3]",
    "a*b?",
    "**",
    "a\\b",
    "$(x)",
    "`x`",
    "{0}",
    "%d",
    "--",
    "=",
    ".",
    "..",
)
ODD += (
    "/",
    "//",
    "/proc/self/mem",
    "/proc/self/fd/99",
    "/dev/full",
    "é" * 200,
    "x" * 256,
    "a/" * 2500,
    "1e-400",
    "9" * 400,
)
ODD += (
    "~root",
    "CON",
    "a;b",
    "a|b",
    "a#b",
    "a:b",
    "'a\"",
    "<b>",
    "\x7f",
    "-",
    "\udcc3",
    "٣.٥",
    "1e9999999999",
    "#",
    "@x",
    "file:///x",
)
"""Parts of values and names; a surrogate stands for a byte that is not UTF-8."""

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
"""Environment variables; those that Python and libraries read when they are loaded have no effect.

"""
