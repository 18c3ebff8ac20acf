"""The measures against values worked out by hand, and the packaged perceptual network."""

import math

import numpy as np
import pytest
import torch

from diffcache import metrics


def clip(value: float, frames: int = 2, size: int = 16) -> torch.Tensor:
    return torch.full((frames, size, size, 3), value)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_psnr_of_a_constant_offset():
    assert metrics.psnr(clip(0.5), clip(0.6)) == pytest.approx(20.0, abs=1e-4)
    assert metrics.psnr(clip(0.0), clip(1.0)) == pytest.approx(0.0)


def test_psnr_pools_squared_errors_over_frames_before_the_logarithm():
    b = clip(0.5)
    b[0] += 0.2
    assert metrics.psnr(clip(0.5), b) == pytest.approx(-10 * math.log10(0.04 / 2), abs=1e-4)
    per_frame = metrics.psnr_per_frame(clip(0.5), b)
    assert per_frame[0] == pytest.approx(-10 * math.log10(0.04), abs=1e-4)
    assert per_frame[1] == math.inf


def test_identical_clips():
    a = noise(3, 16, 16, 3)
    assert metrics.psnr(a, a) == math.inf
    assert metrics.ssim(a, a) == pytest.approx(1.0)
    assert metrics.relative_l1(a, a) == metrics.relative_l2(a, a) == 0.0


def test_a_batch_scores_each_clip_alone():
    a, b = noise(4, 3, 16, 16, 3), noise(4, 3, 16, 16, 3, seed=1)
    for per_clip, one in (
        (metrics.psnr_per_clip, metrics.psnr),
        (metrics.ssim_per_clip, metrics.ssim),
    ):
        scores = per_clip(a, b)
        assert scores.shape == (4,)
        assert scores.tolist() == pytest.approx([one(x, y) for x, y in zip(a, b, strict=True)])
        assert one(a, b) == pytest.approx(float(scores.mean()))
    assert metrics.psnr_per_frame(a, b).shape == metrics.ssim_per_frame(a, b).shape == (4, 3)
    assert metrics.psnr_per_frame(a[0], b[0]).shape == (3,)


def test_ssim_of_constant_frames_is_the_luminance_term():
    expected = (2 * 0.4 * 0.6 + 1e-4) / (0.4**2 + 0.6**2 + 1e-4)
    assert metrics.ssim(clip(0.4), clip(0.6)) == pytest.approx(expected, abs=1e-6)


def test_ssim_of_one_window_matches_the_formula_written_out():
    a, b = (noise(11, 11, seed=s).double().numpy() for s in (3, 4))
    taps = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    window = np.outer(taps, taps) / np.outer(taps, taps).sum()
    mean_a, mean_b = (window * a).sum(), (window * b).sum()
    var_a, var_b = (window * a * a).sum() - mean_a**2, (window * b * b).sum() - mean_b**2
    cov = (window * a * b).sum() - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    expected = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
    expected /= (mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)
    frames = [x.reshape(1, 11, 11, 1) for x in (a, b)]
    assert metrics.ssim(*frames) == pytest.approx(expected, abs=1e-6)


def test_relative_errors():
    a, b = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 2.0, 3.0])
    assert metrics.relative_l1(a, b) == pytest.approx(2 / 6)
    assert metrics.relative_l2(a, b) == pytest.approx(2 / math.sqrt(14))
    assert metrics.relative_l1(a, torch.zeros(3)) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_scores_nan(bad: float):
    a, b = clip(0.5, size=32), clip(0.5, size=32)
    b[1, 0, 0, 0] = bad
    for measure in (metrics.psnr, metrics.relative_l1, metrics.relative_l2, metrics.ssim):
        assert math.isnan(measure(b, a)), measure.__name__
        assert math.isnan(measure(a, b)), measure.__name__
    both = b.clone()
    assert math.isnan(metrics.psnr(b, both))
    assert metrics.psnr_per_frame(a, b)[0] == math.inf
    assert math.isnan(metrics.worst([30.0, math.nan])[0])


def test_uint8_arrays_are_scaled():
    a = np.full((1, 16, 16, 3), 255, np.uint8)
    assert metrics.psnr(a, np.ones((1, 16, 16, 3))) == math.inf


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="one shape"):
        metrics.psnr(clip(0.5), clip(0.5, frames=3))
    with pytest.raises(ValueError, match=r"\[F, H, W, C\]"):
        metrics.psnr(torch.zeros(16, 16, 3), torch.zeros(16, 16, 3))
    with pytest.raises(ValueError, match="rescale"):
        metrics.psnr(clip(-1.0), clip(0.5))
    with pytest.raises(ValueError, match="11x11"):
        metrics.ssim(clip(0.5, size=8), clip(0.5, size=8))
    with pytest.raises(ValueError, match="empty"):
        metrics.relative_l1(torch.zeros(0), torch.zeros(0))


def test_worst_is_the_fifth_percentile_and_the_minimum():
    p5, minimum = metrics.worst(torch.arange(101.0).flip(0))
    assert (p5, minimum) == (5.0, 0.0)
    assert metrics.worst([40.0, 30.0]) == (pytest.approx(30.5), 30.0)
    assert metrics.worst([math.inf, math.inf]) == (math.inf, math.inf)


def test_perceptual_distance_without_its_weights_says_what_to_install(monkeypatch):
    from diffcache import perceptual

    monkeypatch.setattr(perceptual, "find_spec", lambda name: None)
    perceptual._weights.cache_clear()
    with pytest.raises(ImportError, match="pip install --no-deps stlpips-pytorch"):
        metrics.perceptual_distance(clip(0.5, size=32), clip(0.6, size=32))


@pytest.mark.skipif(
    not metrics.perceptual_available(),
    reason="stlpips-pytorch is not installed: no perceptual weights",
)
def test_perceptual_distance_grows_with_the_damage():
    from diffcache import perceptual

    perceptual._weights.cache_clear()
    ramp = torch.linspace(0, 1, 64)
    a = torch.stack([ramp.outer(ramp), ramp.expand(64, 64), ramp.expand(64, 64).T], -1)[None]
    small, large = ((a + s * noise(1, 64, 64, 3) - s / 2).clamp(0, 1) for s in (0.05, 0.3))
    assert metrics.perceptual_distance(a, a) == 0.0
    assert 0 < metrics.perceptual_distance(a, small) < metrics.perceptual_distance(a, large) < 2
