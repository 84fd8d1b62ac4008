"""Sentences on the grid of abilities, and conditions on its records for them to be true."""

import json
import tarfile

import numpy as np

import cope_jax
from cope_jax import encodings, tasks
from cope_jax.evaluation.report import significance
from cope_jax.grids import abilities
from cope_jax.tasks.synthetic import SyntheticTask
from tests.claims.records import IN, OUT, README, ROOT, WORDS, Claim, Records

CELLS = len(list(abilities.get_cells()))
LEARNED = 10.0
"""The mean error in % below which an encoding is said to have learned a task of the grid."""


def splits(r: Records, setting: str, name: str, *names: str) -> list[float]:
    return [r.mean(setting, name, split) for split in names or (IN, "dense", "sparse")]


def solved(r: Records, name: str, split: str) -> significance.Share:
    return significance.solved((r.errors("ignore", name, split) / 100).tolist())


def none_learns_all(r: Records) -> bool:
    """True if each encoding fails in distribution at a task that another one learns."""
    learned = [s for s, c in r.views[IN].items() if any(r.mean(s, n) <= LEARNED for n in c.errors)]
    return all(
        any(n in r.views[IN][s].errors and r.mean(s, n) > LEARNED for s in learned)
        for n in r.names()
    )


def version_2(name: str, seed: int, test: str = "result") -> float:
    """The error in % in distribution of a cell of `arithmetic_v2`."""
    with tarfile.open(ROOT / "experiments" / "results" / "arithmetic_v2.tar.xz") as archive:
        rows = json.load(archive.extractfile(f"arithmetic_v2/{name}_{seed}/{test}.json") or b"")[
            "records"
        ]
    return next(
        100 * x["value"]
        for x in rows
        if (x["split"], x["metric"]) == ("in_distribution", "sequence_error")
    )


def five_seeds(r: Records) -> list[str]:
    """The numbers of encodings with five seeds on each task, and with fewer."""
    full = [
        name
        for name in r.names()
        if all(len(c.errors.get(name, ())) >= 5 for c in r.views[IN].values())
    ]
    return [WORDS[len(full)], str(len(r.names()) - len(full))]


CLAIMS = [
    Claim("[No encoding has every ability][results]", holds=none_learns_all, page=README),
    Claim("Of {} encodings with five seeds,", lambda r: five_seeds(r)[:1], page=README),
    Claim(
        "PaTH alone ignores what does not count;",
        holds=lambda r: r.beats_all("path", "ignore", IN) and r.beats_all("path", "ignore", OUT),
        page=README,
    ),
    Claim(
        "CoPE and PaTH find the second last use of a key;",
        holds=lambda r: (
            max(r.errors("occurrence", n, s).max() for n in ("cope", "path") for s in (IN, OUT))
            < 0.01
        ),
        page=README,
    ),
    Claim(
        "FoX copies longer strings best;",
        holds=lambda r: r.beats_all("fox", "copy", OUT),
        page=README,
    ),
    Claim(
        "MapFormer alone navigates, at the length of training",
        holds=lambda r: r.beats_all("mapformer", "steps", IN) and r.mean("steps", "mapformer") < 1,
        page=README,
    ),
    Claim("ten compared with five seeds", holds=lambda r: five_seeds(r)[0] == "ten", page=README),
    Claim("no encoding learns all {} tasks.", lambda r: [WORDS[len(r.views[IN])]], none_learns_all),
    Claim(
        "Of {} encodings with five seeds, PaTH alone makes no error in flip-flop with one layer, in distribution and "
        "on the sparse split ({} seeds),",
        lambda r: [five_seeds(r)[0], len(r.errors("ignore", "path"))],
        lambda r: (
            [
                n
                for n in r.names(5)
                if not any(r.errors("ignore", n, s).any() for s in (IN, "sparse"))
            ]
            == ["path"]
        ),
    ),
    Claim(
        "and has few errors in the parity of longer strings ({:.1f} %);",
        lambda r: [r.mean("parity", "path", OUT)],
        lambda r: r.beats_all("path", "parity", OUT) and r.mean("parity", "path", OUT) < LEARNED,
    ),
    Claim(
        "CoPE and PaTH find the second last occurrence of a key with at most {:.3f} % error;",
        lambda r: [
            max(r.errors("occurrence", n, s).max() for n in ("cope", "path") for s in (IN, OUT))
        ],
    ),
    Claim(
        "FoX recalls among more pairs with at most {:.2f} % error and copies longer strings best;",
        lambda r: [r.errors("recall", "fox", OUT).max()],
        lambda r: r.beats_all("fox", "copy", OUT),
    ),
    Claim(
        "MapFormer alone learns to navigate, at the length of training.",
        holds=lambda r: r.beats_all("mapformer", "steps", IN) and r.mean("steps", "mapformer") < 1,
    ),
    Claim("Nineteen more have two seeds.", holds=lambda r: five_seeds(r)[1] == "19"),
    Claim(
        "Trained so far are {:,} of {:,} cells: {} encodings with five seeds on every ability, five of them with 25 "
        "seeds on flip-flop, and {} with two seeds",
        lambda r: [
            sum(len(c.errors[n]) for c in r.views[IN].values() for n in c.errors),
            CELLS,
            *five_seeds(r),
        ],
        lambda r: len(r.names(25, "ignore")) == 5,
    ),
    Claim(
        "(4 to {:.0f} s, {:.1f} hours in all)",
        lambda r: [
            max(x["wall_seconds"] for x in r.rows),
            sum(x["wall_seconds"] for x in r.rows if x["split"] == "in_distribution") / 3600,
        ],
        lambda r: round(min(x["wall_seconds"] for x in r.rows)) == 4,
    ),
    Claim(
        "the model with CoPE and seed 0 has {:.1f} % sequence error where no question was in the training data, and "
        "{:.1f} % where nine of ten may have been; RoPE {:.1f} and {:.1f} %. On their 500 test examples the cells have "
        "{:.1f} (CoPE, seed 0), {:.1f} (CoPE, seed 1) and {:.1f} % (RoPE, seed 0), and those of version 1 had {:.1f}, "
        "{:.1f} and {:.1f} %. The five seeds of version 1 range from {:.1f} to {:.1f} % (CoPE) and from {:.1f} to "
        "{:.1f} % (RoPE),",
        lambda r: [
            *(
                version_2(n, 0, f"evaluation{test}")
                for n in ("cope", "rope")
                for test in ("", "_version_1")
            ),
            *(version_2(n, seed) for n, seed in (("cope", 0), ("cope", 1), ("rope", 0))),
            *r.errors("arithmetic", "cope")[:2],
            r.errors("arithmetic", "rope")[0],
            *(end(r.errors("arithmetic", n)) for n in ("cope", "rope") for end in (min, max)),
        ],
    ),
    Claim("- **No encoding has every ability.**", holds=none_learns_all),
    Claim(
        "PaTH makes no error in flip-flop in distribution and on the sparse split ({} seeds), as selective RoPE in its "
        "{} seeds.",
        lambda r: [
            len(r.errors("ignore", "path")),
            WORDS[len(r.errors("ignore", "selective_rope"))],
        ],
        lambda r: (
            not any(
                r.errors("ignore", n, s).any()
                for n in ("path", "selective_rope")
                for s in (IN, "sparse")
            )
        ),
    ),
    Claim(
        "It is the only one with few errors in parity beyond the length of training: {:.1f} %, all others {:.0f} % or "
        "more.",
        lambda r: [
            r.mean("parity", "path", OUT),
            min(r.mean("parity", n, OUT) for n in r.names(0, "parity") if n != "path"),
        ],
    ),
    Claim(
        "PaTH {:.1f} / {:.1f} / {:.1f}, FoX {:.1f} / {:.1f} / {:.1f}, stick-breaking {:.1f} / {:.1f} / {:.1f}, CoPE "
        "{:.1f} / {:.1f} / {:.1f}, RoPE {:.1f} / {:.1f} / {:.1f}.",
        lambda r: [
            value
            for n in ("path", "fox", "stick_breaking", "cope", "rope")
            for value in splits(r, "ignore", n)
        ],
    ),
    Claim(
        "On the dense split {} of {} seeds of PaTH make errors, at most {:.1f} %.",
        lambda r: [
            int((r.errors("ignore", "path", "dense") > 0).sum()),
            len(r.errors("ignore", "path", "dense")),
            r.errors("ignore", "path", "dense").max(),
        ],
    ),
    Claim(
        "There {} of {} seeds of CoPE solve it (error below 1 %; 95 % interval {:.0f} to {:.0f} %) and {} of RoPE, but "
        "the worst seed of CoPE has {:.1f} %.",
        lambda r: [
            (cope := solved(r, "cope", "dense")).solved,
            cope.count,
            100 * cope.low,
            100 * cope.high,
            solved(r, "rope", "dense").solved,
            r.errors("ignore", "cope", "dense").max(),
        ],
    ),
    Claim(
        "At this size CoPE is shown to be worse than FoX, and in distribution better than RoPE.",
        holds=lambda r: (
            {("fox", "cope"), ("cope", "rope")} <= r.better("ignore")
            and ("fox", "cope") in r.better("ignore", OUT)
        ),
    ),
    Claim(
        "With five seeds, MapFormer has {:.1f} / {:.1f} / {:.1f} and signed CoPE {:.1f} / {:.1f} / {:.1f}: in "
        "distribution both are shown to be better than CoPE.",
        lambda r: splits(r, "ignore", "mapformer") + splits(r, "ignore", "cope_signed"),
        lambda r: {("mapformer", "cope"), ("cope_signed", "cope")} <= r.better("ignore", IN),
    ),
    Claim(
        "PaTH is shown to be better than each of the other nine, in and out of distribution.",
        holds=lambda r: r.beats_all("path", "ignore", IN) and r.beats_all("path", "ignore", OUT),
    ),
    Claim(
        "with two and four times as many FoX has {:.2f} % error, in each seed at least 0.01 %, PaTH {:.1f} %, "
        "stick-breaking {:.1f} %, CoPE {:.1f} % and RoPE {:.1f} %.",
        lambda r: [
            r.mean("recall", n, OUT) for n in ("fox", "path", "stick_breaking", "cope", "rope")
        ],
        lambda r: r.errors("recall", "fox", OUT).min() > 0.01,
    ),
    Claim(
        "CoPE and PaTH find the second last occurrence of a key without an error; at twice the length, one of their "
        "ten seeds makes errors, {:.3f} %.",
        lambda r: [r.errors("occurrence", "cope", OUT).max()],
        lambda r: (
            not any(r.errors("occurrence", n).any() for n in ("cope", "path"))
            and sum((r.errors("occurrence", n, OUT) > 0).sum() for n in ("cope", "path")) == 1
        ),
    ),
    Claim(
        "beyond the length and depth of training, ALiBi has {:.1f} % error of Dyck-2, CoPE and no encoding {:.1f}, FoX "
        "{:.1f} and signed CoPE {:.1f}; each is shown to be better than PaTH ({:.1f} %).",
        lambda r: [
            r.mean("stack", n, OUT) for n in ("alibi", "cope", "fox", "cope_signed", "path")
        ],
        lambda r: (
            {(n, "path") for n in ("alibi", "cope", "none", "fox", "cope_signed")}
            <= r.better("stack", OUT)
            and round(r.mean("stack", "none", OUT), 1) == round(r.mean("stack", "cope", OUT), 1)
        ),
    ),
    Claim(
        "FoX copies most longer strings ({:.0f} % error), as do DAPE ({:.0f} %), row FoX ({:.0f} %) and FIRE ({:.0f} "
        "%) in two seeds; the other nine with five seeds have at least {:.0f} %.",
        lambda r: [
            *(r.mean("copy", n, OUT) for n in ("fox", "dape", "row_fox", "fire")),
            min(r.mean("copy", n, OUT) for n in r.names(5) if n != "fox"),
        ],
        lambda r: (
            {n for n in r.names() if r.mean("copy", n, OUT) < 50}
            == {"fox", "dape", "row_fox", "fire"}
        ),
    ),
    Claim(
        "In distribution RoPE ({:.1f} %) is shown to be better than FoX ({:.1f} %).",
        lambda r: [r.mean("copy", n) for n in ("rope", "fox")],
        lambda r: ("rope", "fox") in r.better("copy"),
    ),
    Claim(
        "MapFormer learns the walk ({:.1f} %), and is shown to be better than the other nine.",
        lambda r: [r.mean("steps", "mapformer")],
        lambda r: r.beats_all("mapformer", "steps"),
    ),
    Claim(
        "Signs help CoPE little, if at all: {:.1f} % with signed gates, {:.1f} % without, and no difference is shown.",
        lambda r: [r.mean("steps", n) for n in ("cope_signed", "cope")],
        lambda r: not {("cope_signed", "cope"), ("cope", "cope_signed")} & r.better("steps"),
    ),
    Claim(
        "On other lengths, where a perfect count by the size of training has 38 %, MapFormer has {:.1f} %, and RoPE, "
        "stick-breaking, CoPE and signed CoPE are not shown to differ from it.",
        lambda r: [min(r.mean("steps", n, OUT) for n in r.names(0, "steps"))],
        lambda r: (
            {n for n in r.names(5) if ("mapformer", n) not in r.better("steps", OUT)}
            - {"mapformer"}
            == {"rope", "stick_breaking", "cope", "cope_signed"}
        ),
    ),
    Claim(
        "CoPE has {:.1f} % error in distribution, as RoPE ({:.1f} %) and PoPE ({:.1f} %); PaTH has {:.1f} %, and is "
        "shown to be better than the other nine.",
        lambda r: [r.mean("index", n) for n in ("cope", "rope", "pope", "path")],
        lambda r: r.beats_all("path", "index"),
    ),
    Claim(
        "Nothing learns the task in 1,500 steps,",
        holds=lambda r: min(r.errors("index", n).min() for n in r.names(0, "index")) > 3 * LEARNED,
    ),
    Claim(
        "in flip-flop CARoPE ({:.1f} % in distribution, {:.1f} % out of it), Wall ({:.1f}, {:.1f}) and selective RoPE "
        "({:.1f}, {:.1f}); in recall of more pairs row FoX ({:.1f}), CABLE ({:.1f}) and KERPLE ({:.1f}).",
        lambda r: [
            *(
                r.mean("ignore", n, s)
                for n in ("carope", "wall", "selective_rope")
                for s in (IN, OUT)
            ),
            *(r.mean("recall", n, OUT) for n in ("row_fox", "cable", "kerple")),
        ],
    ),
    Claim(
        "nothing adds longer numbers,",
        holds=lambda r: all(
            (r.errors("arithmetic", n, OUT) == 100).all() for n in r.names(0, "arithmetic")
        ),
    ),
    Claim(
        "These are models of {:,.0f},000 to {:,.0f},000 parameters",
        lambda r: [np.round(end(x["parameters"] for x in r.rows) / 1000) for end in (min, max)],
    ),
]

COUNTS = [
    Claim("{} public names;", lambda _: [WORDS[len(cope_jax.__all__)]], page=README),
    Claim(
        "{} notebooks,",
        lambda _: [WORDS[len(list((ROOT / "notebooks").glob("*.ipynb")))].capitalize()],
        page=README,
    ),
    Claim("each of the {:,} cells", lambda _: [CELLS], page="cope_jax/grids/abilities.py"),
    Claim("Errors of encodings on {} tasks", lambda r: [WORDS[len(r.views[IN])]], page=README),
    Claim("| [Encodings][encodings] | {}:", lambda _: [len(encodings.names())], page=README),
    Claim(
        "{} synthetic tasks for {} abilities,",
        lambda _: [
            sum(
                issubclass(tasks.TASKS.get(name), SyntheticTask)
                and bool(tasks.TASKS.get(name).abilities)
                for name in tasks.names()
            ),
            WORDS[len(tasks.ABILITIES)],
        ],
        page=README,
    ),
]
"""Facts that pages state again: what the package has."""
