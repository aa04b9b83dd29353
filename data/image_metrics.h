// How near restored images are to the truth.
#pragma once

#include "torus/core/tensor.h"

namespace torus {

// Of magnitudes [slices, height, width], a whole volume, as fastMRI's evaluation computes them: with the
// largest value of the true volume as the peak, or `peak` if it is not 0. In double; same bits for any thread
// count. Throw Error{Shape} where the two differ in shape.

/// |restored - truth|^2 / |truth|^2.
double nmse(const Tensor& truth, const Tensor& restored);
/// 10 log10(peak^2 / mean((restored - truth)^2)), in dB.
double psnr(const Tensor& truth, const Tensor& restored, double peak = 0);
/// Structural similarity (Wang et al., 2004), the mean over slices: uniform windows of 7 x 7 inside the
/// slice, sample covariances (divided by 48), K1 = 0.01, K2 = 0.03. Slices of at least 7 x 7.
double ssim(const Tensor& truth, const Tensor& restored, double peak = 0);

}  // namespace torus
