"""The config of an encoding or a composition: names and options, read from one line of text."""

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from flax import nnx

from cope_jax.encodings.base import ENCODINGS, AttentionShape
from cope_jax.encodings.compose import Composed
from cope_jax.errors import ConfigError
from cope_jax.registry import check_fields, check_plain_numbers, checked, configure

Sharing = Literal["layer", "model"]
_PART = re.compile(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class EncodingConfig:
    """The names and options of one encoding, or of the parts of a composition.

    `parts` has (name, options) of each part. If `parts` is empty, there is no encoding.

    >>> EncodingConfig.parse("cope(gate=value) + rope", {"rope": {"base": 500.0}})
    EncodingConfig(parts=(('cope', {'gate': 'value'}), ('rope', {'base': 500.0})))
    >>> EncodingConfig.parse("cope(gates=value)")
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: unknown option of cope 'gates': did you mean 'gate'? Choose from gate, hidden, \
npos_max, position, scale_position_logits, slope
    """

    parts: tuple[tuple[str, dict[str, Any]], ...] = ()

    def __post_init__(self):
        check_fields(self, "encoding")
        names = [name for name, _ in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"encoding {name!r} appears twice in {'+'.join(names)!r}: compose different ones"
                )
        self.options()  # raises ConfigError for a wrong option

    @classmethod
    def parse(
        cls, text: str, defaults: Mapping[str, Mapping[str, Any]] | None = None
    ) -> "EncodingConfig":
        """Reads `name`, `name(option=value, ...)`, or several of these joined by `+`.

        Args:
          text: the names and the options that differ from the defaults. A value is a Python literal
            or a bare word.
          defaults: options of each encoding, by the encoding's name. The text overrides these
            options.
        """
        parts = []
        unclosed = checked(text, str, "encoding").count("(") - text.count(")")
        if unclosed:
            raise ConfigError(
                f"cannot read the encoding {text!r}: a {')' if unclosed > 0 else '('} is missing"
            )
        for piece in split_outside_parentheses(text, "+"):
            match = _PART.fullmatch(piece)
            if not match:
                raise ConfigError(
                    f"cannot read the encoding {text!r}: write name, name(option=value) or name+name, "
                    "with commas between several encodings"
                )
            name = match[1]
            parts.append(
                (name, {**(defaults or {}).get(name, {}), **_options(match[2] or "", text)})
            )
        return cls(tuple(parts))

    def text(self) -> str:
        """Returns the text that `parse` reads as this config.

        >>> EncodingConfig.parse("cope(gate=value, npos_max=8)+rope").text()
        "cope(gate='value', npos_max=8)+rope"
        """
        return "+".join(
            f"{name}({', '.join(f'{option}={value!r}' for option, value in options.items())})"
            if options
            else name
            for name, options in self.parts
        )

    def options(self) -> dict[str, Any]:
        """The config of each part by the part's name, with all its options."""
        return {
            name: configure(ENCODINGS.get(name).Config, options, name)
            for name, options in self.parts
        }

    def build(self, shape: AttentionShape, *, rngs: nnx.Rngs) -> Composed:
        """Creates the encoding, a `Composed` that has its parts by name.

        Errors name the wrong option.
        """
        parts = self.options().items()
        return Composed(
            {name: ENCODINGS.get(name)(options, shape, rngs=rngs) for name, options in parts}, shape
        )

    def split(self, sharing: Sharing) -> tuple["EncodingConfig", "EncodingConfig"]:
        """Returns (the parts that all layers of the model share, the parts that each layer has
        separately).

        If `sharing` is "model", all parts are shared. If it is "layer", only the parts that act on
        the input embeddings are shared.
        """
        shared = tuple(
            item
            for item in self.parts
            if sharing == "model" or ENCODINGS.get(item[0]).traits.embeds_input
        )
        return EncodingConfig(shared), EncodingConfig(
            tuple(item for item in self.parts if item not in shared)
        )


def split_outside_parentheses(text: str, separator: str) -> list[str]:
    """Splits `text` at each separator outside parentheses.

    >>> split_outside_parentheses("cope(gate=value,npos_max=8),rope", ",")
    ['cope(gate=value,npos_max=8)', 'rope']
    """
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def _options(text: str, whole: str) -> dict[str, Any]:
    options = {}
    for item in split_outside_parentheses(text, ",") if text.strip() else []:
        name, equals, value = item.partition("=")
        if not equals or name.strip() in options:
            raise ConfigError(
                f"cannot read {item!r} in the encoding {whole!r}: write option=value, each option once"
            )
        check_plain_numbers(value, f"{name.strip()} in the encoding {whole!r}")
        try:
            options[name.strip()] = ast.literal_eval(value.strip())
        except (
            ValueError,
            SyntaxError,
            TypeError,
            MemoryError,
            RecursionError,
        ):  # the last three: see ast
            options[name.strip()] = value.strip()
    return options
