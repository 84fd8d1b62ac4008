"""Downloads published corpora into a folder that other commands read as --corpora_dir.

cope-jax download --corpora=wikitext-2,tinyshakespeare --out=DATA

The command keeps existing files, so the same command resumes after an interruption.
"""

from absl import flags

from cope_jax.cli import common_flags, outputs
from cope_jax.data.fetch import SOURCES, download

_CORPORA = flags.DEFINE_list(
    "corpora", None, f"Corpora to download: any of {', '.join(SOURCES)} (required).", required=True
)
_OUT = common_flags.DEFINE_out("Folder to write to (required).")
_MIRROR = common_flags.DEFINE_text(
    "mirror",
    "URL of a folder to download from; without this flag, each file comes from its publisher.",
)


def main() -> None:
    """Downloads the files that --out does not have yet, and prints the folder."""
    common_flags.check_names("corpus to download", _CORPORA.value, SOURCES)
    for name in _CORPORA.value:
        source = SOURCES[name] if _MIRROR.value is None else SOURCES[name].at(_MIRROR.value)
        with outputs.writing(_OUT.value):
            written = download(source, _OUT.value)
        outcome = f"wrote {', '.join(written)}" if written else "already present"
        print(f"{name}: {outcome}, in {_OUT.value}", flush=True)
