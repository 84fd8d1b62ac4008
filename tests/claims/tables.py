"""Sentences on runs with figures in RESULTS.md, and conditions on tables for them to be true."""

import functools
import re
from collections.abc import Callable, Sequence

import numpy as np

from cope_jax.evaluation.report import grid_cells
from tests.claims.records import (
    COMMANDS,
    GALLERY,
    IN,
    OUT,
    README,
    RESULTS,
    ROOT,
    Claim,
    Records,
)
from tools import publish


def loses(r: Records, heading: str, name: str, table: int, near: str, far: str) -> float:
    """Per cent by which the perplexity in the column `far` exceeds that in `near`."""
    return 100 * (r.first(heading, name, far, table) / r.first(heading, name, near, table) - 1)


def code_loses(r: Records) -> list[float]:
    """Per cent by which perplexities of code rise from the length of training to eight times it."""
    near = "token perplexity, validation / test"
    return [
        100 * (r.first(CODE, n, "1,024") / r.cell(CODE, n, near)[2] - 1)
        for n in ("cope", "relative", "rope")
    ]


def row(r: Records, heading: str, name: str, *columns: str) -> list[float]:
    return [r.first(heading, name, column) for column in columns]


def beyond(columns: Sequence[str], heading: str) -> Callable[[Records], bool]:
    """True if CoPE has the lowest mean in all columns."""
    others = ("rope", "relative", "learned")
    return lambda r: all(
        r.first(heading, "cope", c) < min(r.first(heading, o, c) for o in others) for c in columns
    )


def kills(r: Records) -> int:
    """All kills of a table whose rows share their names, so it is read by its numbers."""
    (table,) = (tables for name, tables in r.tables.items() if name.startswith("Runs killed"))
    return int(sum(r.number(row["kills"]) for row in table[0].values()))


def quick(r: Records, split: str) -> list[float]:
    """CoPE's errors on a split, of the 20 seeds that were measured first."""
    heading = "Quick"
    return [r.first(heading, split, str(seed), 1 + seed // 10) for seed in range(20)]


def newest(r: Records) -> list[float]:
    """CoPE's errors on the split sparse, of the last 20 measured seeds, which a sentence lists."""
    page = " ".join((ROOT / RESULTS).read_text().split())
    listed = page.split("On sparse, the seeds 0 to 19 have ")[1].split(" %")[0]
    return [r.number(number) for number in re.findall(r"[\d.]*\d", listed)]


def few_errors(r: Records) -> int:
    """The number of these seeds with at most 1 % error."""
    return sum(error <= 1 for error in newest(r))


def of_the_table(r: Records) -> bool:
    """True if the list begins with the error of seed 0 in the table of encodings."""
    return newest(r)[0] == r.first("Quick", "cope", "sparse")


def minilm(r: Records, column: str) -> list[float]:
    """The accuracies of the layers from 2 on."""
    return [r.first(SENSES, f"MiniLM, layer {layer}", column) for layer in range(2, 7)]


def changes(r: Records, which: int) -> list[float]:
    """By how many per cent the medians (0) or minima (1) of times changed in the rearrangement."""
    (tables,) = (tables for name, tables in r.tables.items() if name.startswith(REARRANGED))
    times = (
        [r.cell(REARRANGED, name, c, 2)[which] for c in ("c5c4d3a", "11607b1")]
        for name in tables[2]
    )
    return [100 * (after / before - 1) for before, after in times]


@functools.cache
def version_2() -> Records:
    """The records of version 2 of the abilities."""
    cells, finished, _ = publish.archived("abilities_v2")
    tasks = {cell.setting: cell.config.task.create() for cell in cells}
    return Records(grid_cells.headlines(publish.rows_of(finished), tasks), {})


def best(
    r: Records, names: Sequence[str], column: str, split: str, but: Sequence[str] = ()
) -> bool:
    """True if each of these encodings is shown to be better than each other one in the table, `but`
    some.
    """
    others = r.tables[VERSION_2][0].keys() - {*names, *but}
    better = version_2().better(column, split)
    return all((name, other) in better for name in names for other in others)


def against(r: Records, names: Sequence[str], column: str, table: int) -> list[float]:
    """The errors of encodings, and the least and largest of the others."""
    rows = r.tables[VERSION_2][table]
    others = [r.first(VERSION_2, name, column, table) for name in rows.keys() - set(names)]
    return [*(r.first(VERSION_2, n, column, table) for n in names), min(others), max(others)]


FOX, MAPFORMER, SIGNED = ["fox"], ["mapformer"], ["cope_signed"]
FIRE, CABLE, KERPLE = ["fire"], ["cable"], ["kerple"]
STATE = ["stick_breaking", "cope"]
VERSION_2 = "Abilities, version 2"
SELECTIVE, FLIP_FLOP, ONE_LAYER = "Selective copy, 32", "Flip-flop, length", "Flip-flop with one"
NAVIGATION, COUNTING, COUNTING_3 = "Navigation", "Counting, one", "Counting, three"
GIVEN = "Selective counting"
WIKITEXT, CODE, ADDED = "Language models of WikiText-2", "Language models of code", "CoPE added"
PRETRAINED, REARRANGED = "ELMo and BERT", "Results before and after"
BERT = "Position encodings of"
SENSES = "Word senses"
TAGS = "Parts of speech"
PROBES = "Layers probed"
SPLITS = ("in distribution", "dense", "sparse")
PASSES = ("in distribution", "pass 100", "pass 10")

CLAIMS = [
    Claim(
        "MapFormer makes no error in navigation and none where noise has to be ignored, and is shown to be better than "
        "all others there, in navigation but `cope_signed`, beyond the length of training too ({} % against {} to {}, "
        "and {} % against {} to {}), but has not learned to recall ({} % error).",
        lambda r: [
            *against(r, MAPFORMER, "steps_v2", 1),
            *against(r, MAPFORMER, "ignore_v2", 1),
            r.first(VERSION_2, "mapformer", "recall_v2"),
        ],
        lambda r: (
            all(
                best(r, MAPFORMER, "ignore_v2", split)
                and best(r, MAPFORMER, "steps_v2", split, SIGNED)
                and not best(r, MAPFORMER, "steps_v2", split)
                for split in (IN, OUT)
            )
            and not any(version_2().errors(c, "mapformer").any() for c in ("steps_v2", "ignore_v2"))
        ),
    ),
    Claim(
        "In copies of longer strings FoX ({} %), FIRE ({} %), CABLE ({} %) and KERPLE ({} %) are shown to be better "
        "than all others ({} to {} %), and in recall beyond the length of training CABLE ({} %) better than all "
        "others ({} to {} %) but KERPLE ({} %).",
        lambda r: [
            *against(r, [*FOX, *FIRE, *CABLE, *KERPLE], "copy_v2", 1),
            *(against(r, [*CABLE, *KERPLE], "recall_v2", 1)[n] for n in (0, 2, 3, 1)),
        ],
        lambda r: (
            best(r, [*FOX, *FIRE, *CABLE, *KERPLE], "copy_v2", OUT)
            and not any(best(r, name, "copy_v2", OUT) for name in (FOX, FIRE, CABLE, KERPLE))
            and best(r, CABLE, "recall_v2", OUT, KERPLE)
            and not best(r, CABLE, "recall_v2", OUT)
        ),
    ),
    Claim(
        "In tracking a state stick-breaking ({} % error) is shown to be better than all others ({} to {} %) but CoPE "
        "({} %).",
        lambda r: [against(r, STATE, "state_v2", 0)[n] for n in (0, 2, 3, 1)],
        lambda r: (
            best(r, STATE[:1], "state_v2", IN, STATE[1:]) and not best(r, STATE[:1], "state_v2", IN)
        ),
    ),
    Claim(
        "CoPE makes no error on any split; with fewer or more blanks than in training, the others have a mean sequence "
        "error of {} % or more.",
        lambda r: [
            min(
                r.first(SELECTIVE, n, s)
                for n in ("rope", "relative", "learned")
                for s in SPLITS[1:]
            )
        ],
        lambda r: all(row(r, SELECTIVE, "cope", s) == [0] for s in SPLITS),
    ),
    Claim(
        "on the sparse split CoPE has {} % token error, RoPE {} %, `learned` {} %; on the dense split CoPE has {} % "
        "and RoPE none.",
        lambda r: [
            *(r.first(FLIP_FLOP, n, "sparse") for n in ("cope", "rope", "learned")),
            r.first(FLIP_FLOP, "cope", "dense"),
        ],
        lambda r: r.first(FLIP_FLOP, "rope", "dense") == 0,
    ),
    Claim(
        "FoX and stick-breaking are within 1.4 points of the errors that the PaTH paper prints; PaTH has at most {} % "
        "but on the dense split, where it has {:.0f} % and the paper {:.0f}.",
        lambda r: [
            max(row(r, ONE_LAYER, "path", "in distribution", "sparse")),
            *r.cell(ONE_LAYER, "path", "dense"),
        ],
        lambda r: all(
            abs(ours - paper) < 1.45
            for ours, paper in (
                r.cell(ONE_LAYER, n, s) for n in ("fox", "stick_breaking") for s in SPLITS
            )
        ),
    ),
    Claim(
        "MapFormer has {:.0f} to {:.0f} % error, CoPE {:.0f} to {:.0f} % and RoPE {:.0f} to {:.0f} %, in the order of "
        "the MapFormer paper; CoPE with signed gates, which it does not have, has {:.0f} to {:.0f} %.",
        lambda r: [
            end(row(r, NAVIGATION, n, *SPLITS))
            for n in ("mapformer", "cope", "rope", "cope_signed")
            for end in (min, max)
        ],
        lambda r: all(
            sorted(("mapformer", "cope", "rope"), key=lambda n: r.cell(NAVIGATION, n, s)[which])
            == ["mapformer", "cope", "rope"]
            for s in SPLITS
            for which in (0, 1)
        ),
    ),
    Claim(
        "with fewer `pass`, CoPE has {} % error, RoPE {} %, `relative` {} %, `learned` {} %;",
        lambda r: [
            r.first(COUNTING, n, "pass 10") for n in ("cope", "rope", "relative", "learned")
        ],
    ),
    Claim(
        "CoPE has {} %, the others {} to {} %, but the seeds of CoPE and `relative` overlap.",
        lambda r: [
            r.first(COUNTING_3, "cope", "pass 10"),
            *(
                end(r.first(COUNTING_3, n, "pass 10") for n in ("rope", "relative", "learned"))
                for end in (min, max)
            ),
        ],
        lambda r: (
            r.cell(COUNTING_3, "cope", "pass 10")[-1]
            > r.cell(COUNTING_3, "relative", "pass 10")[-2]
        ),
    ),
    Claim(
        "So trained, CoPE has {} % error and {} % at twice the length, RoPE {} and {} %, a decoder without positions "
        "{} and {} %.",
        lambda r: [
            r.first(GIVEN, n, s, 1)
            for n in ("cope", "rope", "none")
            for s in ("in distribution", "twice as long")
        ],
    ),
    Claim(
        "at eight times the length of training CoPE's perplexity is {:.1f} % worse than at the length of training, "
        "`relative`'s {:.0f} % and RoPE's {:.0f} %.",
        lambda r: [
            loses(r, WIKITEXT, n, 1, "token perplexity at length 128", "1,024")
            for n in ("cope", "relative", "rope")
        ],
    ),
    Claim(
        "At the length of training CoPE has a perplexity of {}, `relative` {}.",
        lambda r: [
            r.cell(WIKITEXT, n, "token perplexity, validation / test")[2]
            for n in ("cope", "relative")
        ],
    ),
    Claim(
        "at eight times the length of training CoPE's perplexity is {:.0f} % worse, `relative`'s {:.0f} % and RoPE's "
        "{:.0f} %.",
        code_loses,
    ),
    Claim(
        "after 300 steps perplexity is {:.1f} % better at the length of training and {:.1f} % better at eight times "
        "that length.",
        lambda r: [
            100 * (1 - r.first(ADDED, "rope+cope", c) / r.first(ADDED, "rope", c))
            for c in ("test", "1,024")
        ],
    ),
    Claim(
        "it predicts {} % of the masked pieces correctly with RoPE and {} % with learned positions (one seed).",
        lambda r: [
            r.cell(BERT, n, "masked pieces right, validation / test, %")[1]
            for n in ("rope", "learned, BERT's own")
        ],
    ),
    Claim(
        "by 5 nearest neighbours, the mean of context-free vectors reaches {} %, our ELMo {} %, our BERT {} %, MiniLM "
        "{} %.",
        lambda r: [
            r.first(SENSES, n, "5 nearest")
            for n in ("word2vec, context", "ELMo, layer 1", "BERT, layer 3", "MiniLM, layer 6")
        ],
    ),
    Claim(
        "after {} kills, on disks and in buckets, every run ended with the same bits as an uninterrupted one.",
        lambda r: [kills(r)],
    ),
    Claim(
        "After more than 700 kills on disks and in buckets,",
        holds=lambda r: kills(r) > 700,
        page="docs/training.md",
    ),
    Claim(
        "The mean ± standard deviation and the worst seed are {:.2f} ± {:.2f} and {:.2f} in distribution, {:.0f} ± "
        "{:.0f} and {:.0f} on dense, and {:.2f} ± {:.2f} and {:.2f} on sparse. All 20 seeds have at most 1 % on every "
        "split, and {} make no error.",
        lambda r: [
            *(
                f
                for s in SPLITS
                for f in (np.mean(quick(r, s)), np.std(quick(r, s), ddof=1), max(quick(r, s)))
            ),
            sum(not any(seed) for seed in zip(*(quick(r, s) for s in SPLITS), strict=True)),
        ],
        lambda r: max(max(quick(r, s)) for s in SPLITS) <= 1,
    ),
    Claim(
        "On the dense split CoPE, unlike RoPE and `relative`, makes errors ({} ± {}).",
        lambda r: r.cell(FLIP_FLOP, "cope", "dense")[:2],
        lambda r: [r.first(FLIP_FLOP, n, "dense") for n in ("rope", "relative")] == [0, 0],
    ),
    Claim(
        "The results have the paper's order on every split where the encodings differ: CoPE, then RoPE and relative, "
        "then absolute.",
        holds=lambda r: all(
            row(r, COUNTING, "cope", s)
            < row(r, COUNTING, "rope", s)
            < row(r, COUNTING, "relative", s)
            < row(r, COUNTING, "learned", s)
            for s in ("in distribution", "pass 10")
        ),
    ),
    Claim(
        "More `pass` cost no encoding more than 0.3 points",
        holds=lambda r: all(
            r.first(COUNTING, n, "pass 100") - r.first(COUNTING, n, "in distribution") < 0.301
            for n in ("cope", "rope", "relative", "learned")
        ),
    ),
    Claim(
        "CoPE has the lowest mean error on every split, as in the paper",
        holds=beyond(PASSES, COUNTING_3),
    ),
    Claim(
        "A BiLSTM over the words of the sentence adds {:.1f} points, the characters of words another {:.1f} (because "
        "of endings), and the frozen vectors of our ELMo another {:.1f}.",
        lambda r: np.diff(
            [
                r.first(TAGS, n, "test")
                for n in ("majority", "words", "words+characters", "words+characters+elmo")
            ]
        ).tolist(),
    ),
    Claim(
        "parts of speech are best in layers 2 to 4 and fall towards the top ({} → {}), below all lower layers.",
        lambda r: [r.first(PROBES, f"MiniLM, layer {n}", "parts of speech") for n in (2, 6)],
        lambda r: (
            np.argsort(
                [-r.first(PROBES, f"MiniLM, layer {n}", "parts of speech") for n in range(1, 7)]
            )[[0, 1, 2, -1]].tolist()
            == [1, 2, 3, 5]
        ),
    ),
    Claim(
        "CoPE is better than there up to four times the length and {:.0f} % worse at eight times, where `relative` is "
        "{:.0f} % worse and RoPE {:.0f} %.",
        code_loses,
        lambda r: (
            max(row(r, CODE, "cope", "length 256", "512"))
            < r.cell(CODE, "cope", "token perplexity, validation / test")[2]
        ),
    ),
    Claim(
        "CoPE keeps its perplexity at eight times the length of training ({:.1f} % worse).",
        lambda r: [loses(r, WIKITEXT, "cope", 1, "token perplexity at length 128", "1,024")],
    ),
    Claim(
        "The other encodings fail on the splits `dense` and `sparse`.",
        holds=lambda r: (
            min(r.first("Quick", n, s) for n in ("rope", "relative", "learned") for s in SPLITS[1:])
            > 70
        ),
        page=COMMANDS,
    ),
    Claim(
        "CoPE makes no errors on any split.",
        holds=lambda r: not any(row(r, SELECTIVE, "cope", *SPLITS)),
        page=GALLERY,
    ),
    Claim(
        "{:.2f} ± {:.2f}, and {} of 20 have at most 1 %.",
        lambda r: [np.mean(newest(r)), np.std(newest(r), ddof=1), few_errors(r)],
        lambda r: len(newest(r)) == 20,
    ),
    Claim(
        "{} of 20 seeds of CoPE have at most 1 %, and the worst has {:.1f} %.",
        lambda r: [few_errors(r), max(newest(r))],
        of_the_table,
    ),
    Claim(
        "CoPE has at most 1 % error on every split, with {} of [20 "
        "seeds](../experiments/RESULTS.md#quick-selective-copy-16-symbols-among-16-blanks) (the worst: {:.1f} % on "
        "`sparse`).",
        lambda r: [few_errors(r), max(newest(r))],
        of_the_table,
        page=COMMANDS,
    ),
    Claim(
        "CoPE at most 1 % on each split in {} of 20 seeds; RoPE {:.0f}, {:.0f} and {:.0f} %; relative {:.0f}, {:.0f} "
        "and {:.0f} %; absolute {:.0f}, {:.0f} and {:.0f} %.",
        lambda r: [
            few_errors(r),
            *(e for n in ("rope", "relative", "learned") for e in row(r, "Quick", n, *SPLITS)),
        ],
        page="cope_jax/configs/quick.py",
    ),
    Claim(
        "cope {:.1f} {:.1f} {:.1f} rope {:.1f} {:.1f} {:.1f} relative {:.1f} {:.1f} {:.1f} learned {:.1f} {:.1f} "
        "{:.1f}",
        lambda r: [
            e for n in ("cope", "rope", "relative", "learned") for e in row(r, "Quick", n, *SPLITS)
        ],
        page=README,
    ),
    Claim(
        "most frequent tag is right for {} % of the test words of EWT",
        lambda r: [r.first(TAGS, "majority", "test")],
        page="docs/contextual.md",
    ),
    Claim(
        "BERT predicts almost six times as many pieces correctly as the most frequent piece would.",
        holds=lambda r: (
            5.7
            < r.first(PRETRAINED, "BERT, masked pieces right, %", "validation")
            / r.first(PRETRAINED, "BERT, masked pieces right, %", "without context")
            < 6
        ),
    ),
    Claim(
        "with so little fine-tuning neither model reaches the SVM on characters.",
        holds=lambda r: (
            max(r.first("Spam", n, "accuracy %") for n in ("bert_fine_tuned", "minilm_fine_tuned"))
            < r.first("Spam", "svm_characters", "accuracy %")
        ),
    ),
    Claim(
        "MiniLM exceeds the mean of the context from layer 2 on by both methods, and is best at the top.",
        holds=lambda r: all(
            r.first(SENSES, "word2vec, context", c) < min(minilm(r, c))
            and max(minilm(r, c)) == minilm(r, c)[-1]
            for c in ("nearest mean", "5 nearest")
        ),
    ),
    Claim(
        "medians differ by −{:.0f} to +{:.0f} %:",
        lambda r: [-min(changes(r, 0)), max(changes(r, 0))],
        lambda r: max(changes(r, 1)) <= 0,
    ),
]
