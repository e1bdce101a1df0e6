import numpy as np
import pytest

from d5p4.eval.representation import average_cosine, linear_cka
from tests.refusals import refusal


@pytest.fixture
def random():
    return np.random.default_rng(0)


def by_hsic(x, y):
    """CKA as a ratio of HSIC = tr(K H M H) / (n - 1)², with the centring matrix H = I - 1/n."""
    n = len(x)
    h = np.eye(n) - np.full((n, n), 1 / n)

    def hsic(k, m):
        return np.trace(k @ h @ m @ h) / (n - 1) ** 2

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def by_features(x, y):
    """CKA without Gram matrices: ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖) of centred columns."""
    x, y = x - x.mean(0), y - y.mean(0)
    return np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def test_cka_is_what_other_formulas_say(random):
    for n, d, e in ((2, 1, 1), (5, 3, 7), (40, 8, 8), (64, 100, 5)):
        x = random.normal(size=(n, d)) + 3
        y = random.normal(size=(n, e)) + x[:, :1]
        assert linear_cka(x, y) == pytest.approx(by_hsic(x, y), abs=1e-10), (n, d, e)
        assert linear_cka(x, y) == pytest.approx(by_features(x, y), abs=1e-10), (n, d, e)
        assert linear_cka(x, y) == pytest.approx(linear_cka(y, x), abs=1e-12), (n, d, e)


def test_cka_by_hand():
    x = [[1.0], [-1.0], [1.0], [-1.0]]
    y = [[1.0], [1.0], [-1.0], [-1.0]]  # uncorrelated with x
    both = np.concatenate([x, y], axis=1)  # K = xxᵀ + yyᵀ, of norm √2 · 4; <K, xxᵀ> = 16 = |xxᵀ|²
    assert linear_cka(x, x) == pytest.approx(1)
    assert linear_cka(x, y) == pytest.approx(0, abs=1e-12)
    assert linear_cka(both, x) == pytest.approx(1 / np.sqrt(2))


def test_cka_does_not_see_rotation_scale_or_place(random):
    x, y = random.normal(size=(20, 6)), random.normal(size=(20, 4))
    turn, _ = np.linalg.qr(random.normal(size=(6, 6)))
    for other in (x @ turn, 1e-8 * x, -1e8 * x, x + 100.0, 3e-3 * x @ turn - 5):
        assert linear_cka(other, y) == pytest.approx(linear_cka(x, y), abs=1e-9)
        assert linear_cka(x, other) == pytest.approx(1, abs=1e-9)
    stretched = x @ np.diag([10, 1, 1, 1, 1, 1])
    assert abs(linear_cka(stretched, y) - linear_cka(x, y)) > 1e-3  # it does see what is no rotation


def test_numbers_too_large_or_small_for_a_fourth_power(random):
    x, y = random.normal(size=(10, 3)), random.normal(size=(10, 3))
    assert linear_cka(1e120 * x, 1e-120 * y) == pytest.approx(linear_cka(x, y), abs=1e-9)


def test_a_view_that_says_nothing_has_cka_0(random):
    x = random.normal(size=(6, 3))
    assert linear_cka(x, np.full((6, 2), 0.1)) == 0  # 0.1 six times has a mean that is not quite 0.1
    assert linear_cka(np.zeros((6, 2)), x) == 0
    assert linear_cka(x[:1], x[:1]) == 0
    assert linear_cka(np.zeros((0, 2)), np.zeros((0, 3))) == 0


def test_average_cosine_is_the_mean_over_pairs(random):
    rows = random.normal(size=(7, 5)) + 0.5
    pairs = [
        rows[i] @ rows[j] / (np.linalg.norm(rows[i]) * np.linalg.norm(rows[j]))
        for i in range(7)
        for j in range(7)
        if i != j
    ]
    assert average_cosine(rows) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_average_cosine_by_hand():
    assert average_cosine([[2.0, 0.0], [5.0, 0.0]]) == pytest.approx(1)
    assert average_cosine([[2.0, 0.0], [-5.0, 0.0]]) == pytest.approx(-1)
    assert average_cosine([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]) == pytest.approx(2 * 0.5**0.5 / 3)
    assert average_cosine([[1.0, 0.0], [0.0, 0.0]]) == 0  # nothing has no direction
    assert average_cosine([[1.0, 2.0]]) == average_cosine(np.zeros((0, 4))) == 0


def test_bad_input():
    for x, y, message in (
        (np.zeros((3, 2)), np.zeros((4, 2)), "x has 3 rows, y has 4"),
        (np.zeros(3), np.zeros((3, 2)), "x must have shape [items, numbers], not (3,)"),
        (np.zeros((2, 2)), np.full((2, 2), np.nan), "y holds numbers that are not finite"),
    ):
        assert message in refusal(linear_cka, x, y)
    assert "not finite" in refusal(average_cosine, [[1.0, np.inf]])
    assert "shape" in refusal(average_cosine, [1.0, 2.0])
