"""Counts of the tokens, words and bytes of a text, and its loss in the units that papers report."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Counts:
    """The size of a split in several units. The total loss per unit can be compared between models.

    Attributes:
      tokens: number of tokens of the text; each token is predicted once.
      words: number of words separated by spaces, plus one for the end of each line, as WikiText
        counts them.
      bytes: number of bytes of the text in UTF-8.
      unknown: number of words outside the vocabulary, or of texts with words that tokens do not
        give back.
      changed: number of texts with bytes that tokens do not give back.
    """

    tokens: int
    words: int
    bytes: int
    unknown: int = 0
    changed: int = 0

    def per_unit(self, nats: float) -> dict[str, float]:
        """Converts `nats`, the sum of the losses of all these tokens, to units of papers.

            loss = nats/tokens, perplexity = exp(nats/words), bits_per_byte = nats/(bytes · ln 2).

        Perplexities per word can be compared between tokenizers: the probability of a word is the
        product of the probabilities of its tokens. By WikiText's convention every line ends with a
        word, `<eos>`. Code has no agreed division into words; report bits per byte, or the
        perplexity per token, exp(loss), and name the tokenizer.

        If some words are unknown, only the results per token are returned. These can be compared
        only between models with the same vocabulary. A model that predicts `<unk>` has not
        predicted the word, so a smaller vocabulary would give better results per word and per byte.
        If the bytes of a text do not come back from its tokens, as from a tokenizer that
        normalizes, there are no bits per byte: the model has predicted other bytes.

        >>> Counts(tokens=6, words=4, bytes=20).per_unit(18.0)
        {'loss': 3.0, 'token_perplexity': 20.08..., 'perplexity': 90.01..., 'bits_per_byte': 1.29...}
        """
        with np.errstate(over="ignore"):  # perplexity is infinite if the model has diverged
            loss = nats / self.tokens
            results = {"loss": loss, "token_perplexity": float(np.exp(loss))}
            if not self.unknown:
                results["perplexity"] = float(np.exp(nats / self.words))
            if not self.unknown and not self.changed:
                results["bits_per_byte"] = nats / (self.bytes * float(np.log(2)))
        return results

    @property
    def left_out(self) -> str:
        """Says which results are left out, and why; "" if none is.

        >>> Counts(tokens=6, words=4, bytes=20, changed=2).left_out
        'no bits per byte: the tokenizer changes bytes of texts (2)'
        """
        if self.unknown:
            return f"no perplexity per word, no bits per byte: the tokenizer loses words ({self.unknown:,})"
        if self.changed:
            return f"no bits per byte: the tokenizer changes bytes of texts ({self.changed:,})"
        return ""
