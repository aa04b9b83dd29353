#include "torus/data/image_metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "torus/core/parallel.h"

namespace torus {

namespace {

struct Pair {
  std::vector<double> truth, restored;
  double peak;
};

Pair pair_of(const char* name, const Tensor& truth, const Tensor& restored, double peak) {
  check(truth.shape() == restored.shape() && truth.dim() == 3 && truth.numel() > 0, Error::Kind::Shape, "[",
        name, "] expected two volumes [slices, height, width] alike, got ", truth.shape(), " and ",
        restored.shape());
  Pair result{truth.to_vector<double>(), restored.to_vector<double>(), peak};
  if (peak == 0) result.peak = *std::max_element(result.truth.begin(), result.truth.end());
  return result;
}

double squared_error(const Pair& p) {
  double sum = 0;
  for (size_t i = 0; i < p.truth.size(); ++i)
    sum += (p.restored[i] - p.truth[i]) * (p.restored[i] - p.truth[i]);
  return sum;
}

constexpr int64_t window = 7;

// Means over the windows of one slice, [height - 6, width - 6].
template <class F>
std::vector<double> window_means(int64_t height, int64_t width, F&& value) {
  const int64_t rows = height - window + 1, columns = width - window + 1;
  std::vector<double> lines(static_cast<size_t>(height * columns)),
      means(static_cast<size_t>(rows * columns));
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < columns; ++x)
      for (int64_t j = 0; j < window; ++j)
        lines[static_cast<size_t>(y * columns + x)] += value(static_cast<size_t>(y * width + x + j));
  for (int64_t i = 0; i < rows * columns; ++i) {
    for (int64_t j = 0; j < window; ++j)
      means[static_cast<size_t>(i)] += lines[static_cast<size_t>(i + j * columns)];
    means[static_cast<size_t>(i)] /= window * window;
  }
  return means;
}

double ssim_of_slice(const double* a, const double* b, int64_t height, int64_t width, double peak) {
  const auto mean = [&](auto value) { return window_means(height, width, value); };
  const auto mean_a = mean([&](size_t i) { return a[i]; }), mean_b = mean([&](size_t i) { return b[i]; }),
             mean_aa = mean([&](size_t i) { return a[i] * a[i]; }),
             mean_bb = mean([&](size_t i) { return b[i] * b[i]; }),
             mean_ab = mean([&](size_t i) { return a[i] * b[i]; });
  const double c1 = 0.01 * 0.01 * peak * peak, c2 = 0.03 * 0.03 * peak * peak;
  constexpr double n = window * window, unbiased = n / (n - 1);
  double sum = 0;
  for (size_t i = 0; i < mean_a.size(); ++i) {
    const double ma = mean_a[i], mb = mean_b[i];
    const double va = unbiased * (mean_aa[i] - ma * ma), vb = unbiased * (mean_bb[i] - mb * mb),
                 vab = unbiased * (mean_ab[i] - ma * mb);
    sum += (2 * ma * mb + c1) * (2 * vab + c2) / ((ma * ma + mb * mb + c1) * (va + vb + c2));
  }
  return sum / static_cast<double>(mean_a.size());
}

}  // namespace

double nmse(const Tensor& truth, const Tensor& restored) {
  const Pair p = pair_of("nmse", truth, restored, 1);
  return squared_error(p) / std::inner_product(p.truth.begin(), p.truth.end(), p.truth.begin(), 0.);
}

double psnr(const Tensor& truth, const Tensor& restored, double peak) {
  const Pair p = pair_of("psnr", truth, restored, peak);
  return 10 * std::log10(p.peak * p.peak * static_cast<double>(p.truth.size()) / squared_error(p));
}

double ssim(const Tensor& truth, const Tensor& restored, double peak) {
  const Pair p = pair_of("ssim", truth, restored, peak);
  const int64_t slices = truth.size(0), height = truth.size(1), width = truth.size(2);
  check(height >= window && width >= window, Error::Kind::Shape,
        "[ssim] expected slices of at least 7 x 7, got ", truth.shape());
  std::vector<double> of_slice(static_cast<size_t>(slices));
  parallel_for(0, slices, 1, [&](int64_t first, int64_t last) {
    for (int64_t z = first; z < last; ++z)
      of_slice[static_cast<size_t>(z)] = ssim_of_slice(
          p.truth.data() + z * height * width, p.restored.data() + z * height * width, height, width, p.peak);
  });
  return std::accumulate(of_slice.begin(), of_slice.end(), 0.) / static_cast<double>(slices);
}

}  // namespace torus
