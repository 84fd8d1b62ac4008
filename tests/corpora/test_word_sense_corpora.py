import collections
import json

import pytest

from cope_jax.corpora.word_sense_corpora import read_coarsewsd, read_semcor
from cope_jax.errors import ConfigError
from tests.corpora.data import real, write

HEADER = "word\tsplit\tsense\tindex\tsentence"


def coarse(folder, *lines):
    return read_coarsewsd(write(folder, "coarsewsd20/coarsewsd20.tsv", "\n".join(lines)))


def words_of_senses(folder, *entries):
    return read_semcor(write(folder, "semcor-noad/semcor_noad.jsonl", "\n".join(entries)))


def test_coarsewsd_lines(tmp_path):
    (occurrence,) = coarse(tmp_path, HEADER, "", "club\ttest\tclub_golf\t1\tthe club is new .")
    assert occurrence.words == ("the", "club", "is", "new", ".")
    assert (occurrence.index, occurrence.lemma, occurrence.sense, occurrence.split) == (
        1,
        "club",
        "club_golf",
        "test",
    )


@pytest.mark.parametrize(
    "line",
    [
        "club\ttest\tx\t5\tthe club is new .",
        "club\tdev\tx\t1\tthe club",
        "club\ttest\tx\t-1\ta",
        "club\ttest\tx",
        f"club\ttest\tx\t{'1' * 5000}\ta",
    ],
)
def test_a_malformed_line_of_coarsewsd_is_named(tmp_path, line):
    with pytest.raises(ConfigError, match=r"coarsewsd20.tsv, line 3 must have "):
        coarse(tmp_path, HEADER, "club\ttest\tx\t0\tclub", line)


def test_coarsewsd_needs_its_header(tmp_path):
    with pytest.raises(ConfigError, match="line 1 must name the columns"):
        coarse(tmp_path, "club\ttest\tx\t0\tclub")


def test_semcor_lines(tmp_path):
    entry = {
        "d": "br-1",
        "t": "He walks his dogs .",
        "a": [[1, "walk", "V", "7.002"], [3, "dog", "N", 4]],
    }
    walk, dog = words_of_senses(tmp_path, json.dumps(entry))
    assert (walk.words[walk.index], walk.lemma, walk.sense) == ("walks", "walk.V", "7.002")
    assert (dog.words[dog.index], dog.lemma, dog.sense) == ("dogs", "dog.N", "4")
    assert walk.split == dog.split  # a document is in one split


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "7", "[" * 100_000, '{"t": "a", "a": []}', '{"d": 1, "t": "a"}'),
        *(
            f'{{"d": "x", "t": "a b", "a": [[{index}, "a", "N", "1"]]}}'
            for index in ("2", "0.5", "true")
        ),
        *(
            f'{{"d": "x", "t": "a b", "a": [[0, "a", "N", {sense}]]}}'
            for sense in ("null", "[1]", "true")
        ),
    ],
)
def test_a_malformed_line_of_semcor_is_named(tmp_path, line):
    with pytest.raises(ConfigError, match=r"semcor_noad.jsonl, line 2 is not ") as error:
        words_of_senses(tmp_path, '{"d": "x", "t": "a", "a": []}', line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("read", [read_coarsewsd, read_semcor])
def test_the_samples_have_every_sense_in_both_splits(read):
    splits = collections.defaultdict(set)
    for occurrence in read(None):
        splits[occurrence.lemma, occurrence.sense].add(occurrence.split)
        assert occurrence.words[occurrence.index].lower().startswith(occurrence.lemma.split(".")[0])
    assert len(splits) == 4
    assert all(both == {"train", "test"} for both in splits.values())


def test_the_published_sizes():
    folder = real("coarsewsd20/coarsewsd20.tsv", "semcor-noad/semcor_noad.jsonl")
    occurrences = read_coarsewsd(folder)
    assert collections.Counter(entry.split for entry in occurrences) == {
        "train": 23_370,
        "test": 10_196,
    }
    assert len({entry.lemma for entry in occurrences}) == 20
    assert len(read_semcor(folder)) == 70_352
