"""Bidirectional language modelling: predicts each word from the words before, and from those after.

Peters et al., "Deep contextualized word representations", NAACL 2018.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from cope_jax.corpora.sentences_by_corpus import Corpus, by_split
from cope_jax.registry import check_at_least, check_fields
from cope_jax.tasks.stored import WordTask
from cope_jax.tasks.task import TASKS, Batch
from cope_jax.tokenizers import characters as chars
from cope_jax.tokenizers.word_level import UNKNOWN, Vocabulary

BEGIN, END = "<S>", "</S>"


@TASKS.register("bilm")
class BiLM(WordTask):
    """Predicts words in both directions. Each sentence w₁…wₙ is read from both ends in turn.

        forward:   <S> w₁ … wₙ  predicts  w₁ … wₙ </S>
        backward:  </S> wₙ … w₁  predicts  wₙ … w₁ <S>

    The inputs are the characters of words, so no input is unknown. The targets are words of the
    vocabulary.

    The fields are `inputs` `[B, L, C]` (characters), `targets` `[B, L]` and `weights` `[B, L]`. The
    backward direction has the same fields with the prefix `backward_`. A stream also has `reset`
    `[B]`.

    Attributes:
      vocabulary: `<unk>`, `<S>`, `</S>`, and the words of the training text, the most frequent
        first.
      max_characters: C.

    >>> task = BiLM(BiLM.Config(length=6, corpus="ud-ewt"))
    >>> batch = task.stream("train", 1)[0]
    >>> for name in ("targets", "backward_targets"):
    ...     print(task.vocabulary.decode(batch[name][0]))
    The old ferry crosses the bay
    . day a twice bay the
    """

    @dataclasses.dataclass(frozen=True)
    class Config:
        """Options of bilm.

        Attributes:
          data_dir: folder with a folder for each corpus. If None, the task uses the built-in
            sample.
          corpus: "wikitext-2", "ud-ewt" or "both". WikiText-2 is read in plain spelling: `-`
            instead of `@-@`.
          files: paths or globs of files of text, in place of a corpus: see
            `sentences_by_corpus.by_split`.
          length: L, the number of words in a window.
          vocab_size: maximum size of the vocabulary. If None, the vocabulary has all words of the
            training text.
          max_characters: C, the maximum number of bytes of a word, including the marks of its
            beginning and end.
        """

        data_dir: str | None = None
        corpus: Corpus = "wikitext-2"
        files: tuple[str, ...] = ()
        length: int = 20
        vocab_size: int | None = None
        max_characters: int = chars.MAX_CHARACTERS

        def __post_init__(self):
            check_fields(self, "bilm")
            check_at_least(1, "bilm", length=self.length)
            check_at_least(4, "bilm", vocab_size=self.vocab_size)
            check_at_least(3, "bilm", max_characters=self.max_characters)

    def __init__(self, config: Config):
        texts = {
            split: list(itertools.chain.from_iterable(documents))
            for split, documents in by_split(config.corpus, config.data_dir, config.files).items()
        }
        self._keep_digests(config, {split: map("\n".join, text) for split, text in texts.items()})
        words = (word for sentence in texts["train"] for word in sentence)
        vocabulary = Vocabulary.build(words, config.vocab_size, reserved=(UNKNOWN, BEGIN, END))
        self.max_characters = config.max_characters
        longest = config.max_characters
        self._splits = {split: _Split(text, vocabulary, longest) for split, text in texts.items()}
        fields = {split: text.fields for split, text in self._splits.items()}
        super().__init__(config, vocabulary, fields)

    def _finish(self, split: str, batch: Batch) -> Batch:
        """Replaces each input word by its characters, and padding by zeros."""
        table_UC = self._splits[split].table_UC
        return {**batch, **{name: table_UC[batch[name]] for name in ("inputs", "backward_inputs")}}


class _Split:
    """The two streams of a text. Inputs index the rows of `table_UC`: the characters of words."""

    def __init__(
        self, sentences: Sequence[Sequence[str]], vocabulary: Vocabulary, max_characters: int
    ):
        kinds = list(dict.fromkeys(word for sentence in sentences for word in sentence))
        indices = {word: index for index, word in enumerate(kinds, start=3)}
        ends = (chars.BEGIN_SENTENCE, chars.END_SENTENCE)
        marks = [chars.sentence_mark(mark, max_characters) for mark in ends]
        padding = np.zeros((1, max_characters), np.int32)
        words_UC = chars.characters(kinds, max_characters)
        self.table_UC = np.concatenate([padding, np.stack(marks), words_UC])
        target_U = np.concatenate([np.zeros(1, np.int32), vocabulary.encode([BEGIN, END, *kinds])])
        begin, end = 1, 2
        numbers = [[indices[word] for word in sentence] for sentence in sentences]
        lasts = np.cumsum([len(sentence) + 1 for sentence in sentences], dtype=np.int64) - 1
        self.fields: dict[str, np.ndarray] = {}
        for name, first, last, step in (("", begin, end, 1), ("backward_", end, begin, -1)):
            words = (word for sentence in numbers for word in (first, *sentence[::step]))
            read = np.fromiter(words, np.int32)
            following = np.roll(read, -1)
            following[lasts] = last
            self.fields[f"{name}inputs"] = read
            self.fields[f"{name}targets"] = target_U[following]
            self.fields[f"{name}weights"] = np.ones(len(read), np.float32)
