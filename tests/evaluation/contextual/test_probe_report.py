import numpy as np
import pytest

from cope_jax.evaluation.contextual import probing
from cope_jax.evaluation.contextual.probing import LayerScore, Probing


def measured(accuracies):
    scores = tuple(LayerScore(f"layer {n}", a, 0.5) for n, a in enumerate(accuracies))
    baselines = {"majority": 0.25, "majority of the word": 0.5}
    return Probing("x", scores, (0.25, 0.25, 0.5), 0.9, (0.5, 0.75, 0.9), baselines)


@pytest.mark.parametrize(
    ("syntax", "meaning", "verdict"),
    [
        ((0.5, 0.9, 0.5), (0.5, 0.6, 0.8), "This is as claimed."),
        ((0.5, 0.6, 0.8), (0.5, 0.9, 0.5), "This is the opposite of the claim."),
        (
            (0.5, 0.9, 0.5),
            (0.5, 0.8, 0.5),
            "Both are best in the same layer, which the claim does not foresee.",
        ),
        ((0.5, 0.9, 0.5), (0.5, 0.799, 0.8), "The best layers are in the claimed order, but"),
        ((0.5, 0.9, 0.901), (0.5, 0.8, 0.5), "The best layers are in the opposite order, but"),
        ((0.5, 0.9, 0.899), (0.5, 0.8, 0.5), "One layer is best for both, but"),
    ],
)
def test_the_paragraph_follows_from_the_numbers(syntax, meaning, verdict):
    said = probing.paragraph(
        {"BERT": {probing.TAGS: measured(syntax), probing.SENSES: measured(meaning)}},
        {probing.TAGS: 1000, probing.SENSES: 1000},
    )
    assert verdict in said
    assert f"best in layer {np.argmax(syntax)} ({100 * max(syntax):.1f} %" in said
    assert f"word senses are best in layer {np.argmax(meaning)} ({100 * max(meaning):.1f} %" in said
    assert "centres at 1.25 and 1.25" in said and "50.0 % of parts of speech" in said
