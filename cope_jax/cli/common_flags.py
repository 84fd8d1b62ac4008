"""Defines flags that several commands have, each with its own help, and checks names in flags."""

from collections.abc import Collection, Sequence
from typing import Any

from absl import flags

from cope_jax.errors import ConfigError
from cope_jax.registry import unknown

# Flags belong to the module that calls this one, whose --help shows them.
flags.disclaim_key_flags()


def DEFINE_encoding() -> flags.FlagHolder[list[str]]:
    """Defines --encoding, the files of encodings that the package does not have."""
    return plain(
        flags.DEFINE_multi_string(
            "encoding",
            [],
            "Python file that registers an encoding of your own, such as mine.py; may be given several times.",
        )
    )


def check_files(chosen: Sequence[str], flag: str) -> None:
    """ConfigError if a file in --encoding has none of the encodings that --`flag` has chosen."""
    from cope_jax.encodings import EncodingConfig, load

    used = {name for encoding in chosen for name, _ in EncodingConfig.parse(encoding).parts}
    for file in flags.FLAGS.encoding:
        if used.isdisjoint(names := load(file)):
            raise ConfigError(
                f"{file} registers {', '.join(names)}, but --{flag} is {','.join(chosen)}: "
                f"give --{flag}={names[0]}, or leave out the file"
            )


def plain(holder: flags.FlagHolder[list[str]]) -> flags.FlagHolder[list[str]]:
    """Removes what absl adds to the help of a flag that may be given several times."""
    flag = flags.FLAGS[holder.name]
    flag.help, flag.default_as_str = flag.help.partition(";\n")[0], None
    return holder


def DEFINE_model(text: str) -> flags.FlagHolder[str]:
    """Defines --model, the folder of the model that a command needs."""
    return flags.DEFINE_string("model", None, text, required=True)


def DEFINE_models() -> flags.FlagHolder[list[str]]:
    """Defines --models, which names embedders."""
    return flags.DEFINE_list(
        "models",
        None,
        'Folders of training runs or of published models, or "minilm" (required).',
        required=True,
    )


def DEFINE_corpora_dir() -> flags.FlagHolder[str | None]:
    """Defines --corpora_dir, the folder of corpora that a command reads."""
    return flags.DEFINE_string(
        "corpora_dir",
        None,
        "Folder that contains the downloaded corpora; without this flag, small built-in samples are used.",
    )


def DEFINE_workdir(text: str) -> flags.FlagHolder[str]:
    """Defines --workdir, the folder that a command writes to."""
    return flags.DEFINE_string("workdir", None, text, required=True)


def DEFINE_out(text: str) -> flags.FlagHolder[str]:
    """Defines --out, the folder or file that a command writes."""
    return flags.DEFINE_string("out", None, text, required=True)


def DEFINE_seed() -> flags.FlagHolder[int | None]:
    """Defines --seed, which chooses one of the models of a run."""
    return flags.DEFINE_integer(
        "seed",
        None,
        "Seed of the model to use, if the run trained several seeds; without this flag, the first seed.",
    )


def DEFINE_count(name: str, default: int | None, text: str) -> flags.FlagHolder[Any]:
    """Defines a flag for a number of things, at least 1."""
    return flags.DEFINE_integer(name, default, text, lower_bound=1)


def DEFINE_text(name: str, text: str) -> flags.FlagHolder[Any]:
    """Defines a flag for a text, a path or a name, which may be omitted."""
    return flags.DEFINE_string(name, None, text)


def check_names(kind: str, names: Sequence[str], choices: Collection[str]) -> None:
    """Raises ConfigError for a name that is not among the choices, and for an empty list."""
    for name in names:
        if name not in choices:
            raise unknown(kind, name, choices)
