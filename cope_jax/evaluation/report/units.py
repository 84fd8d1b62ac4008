"""In which unit a measure is shown."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Unit:
    """How figures are shown.

    Attributes:
      scale: what a value is multiplied by.
      symbol: "%" or nothing.
      highest: the highest value that there can be, shown as such; None: there is none.
      decimals: of a value of 1 and more in a table.
    """

    scale: float
    symbol: str
    highest: float | None
    decimals: int

    def behind(self, joint: str) -> str:
        """The symbol behind a joint, and nothing where there is none.

        >>> SHARE.behind(" in "), PLAIN.behind(" in ")
        (' in %', '')
        """
        return joint + self.symbol if self.symbol else ""


SHARE = Unit(100.0, "%", 100.0, 1)
PLAIN = Unit(1.0, "", None, 2)


def unit_of(metric: str) -> Unit:
    """Shares are called errors and shown in per cent; losses and perplexities as they are.

    >>> unit_of("token_error").symbol, unit_of("perplexity").symbol
    ('%', '')
    """
    return SHARE if metric.endswith("error") else PLAIN
