#include "torus/data/image_metrics.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/expect_error.h"

namespace torus {
namespace {

struct Volumes {
  Tensor truth = Tensor::zeros({3, 11, 9}), restored = Tensor::zeros({3, 11, 9});

  Volumes() {
    float *a = truth.mutable_data<float>(), *b = restored.mutable_data<float>();
    for (int z = 0; z < 3; ++z)
      for (int y = 0; y < 11; ++y)
        for (int x = 0; x < 9; ++x) {
          const double value = (z * 7 + y * 5 + x * 3) % 17 / 16. + y / 11.;
          *a++ = static_cast<float>(value);
          *b++ = static_cast<float>(value + ((z * 5 + y * 3 + x * 7) % 13 - 6) / 40.);
        }
  }
};

// The numbers are scikit-image's (0.26), called as fastMRI's evaluation calls it.
TEST(ImageMetrics, AreThoseOfFastMri) {
  const Volumes v;
  EXPECT_NEAR(nmse(v.truth, v.restored), 0.008099744836486239, 1e-14);
  EXPECT_NEAR(psnr(v.truth, v.restored), 26.186019426684638, 1e-11);
  EXPECT_NEAR(ssim(v.truth, v.restored), 0.9670941208248013, 1e-12);
  EXPECT_NEAR(psnr(v.truth, v.restored, 2 * 1.9090908765792847), 32.20661933996426, 1e-11);
  EXPECT_NEAR(ssim(v.truth, v.restored, 2 * 1.9090908765792847), 0.9682473799547789, 1e-12);
}

// Of the whole volume: a dark slice counts by its error alone.
TEST(ImageMetrics, TakeThePeakOfTheVolume) {
  Tensor truth = Tensor::full({2, 8, 8}, 0.01), restored = truth.clone();
  truth.select(0, 1).fill_(1);
  restored.select(0, 1).fill_(1);
  restored.select(0, 0).fill_(0.02);
  EXPECT_NEAR(psnr(truth, restored), 10 * std::log10(2 / 1e-4), 1e-5);
  EXPECT_NEAR(nmse(truth, restored), 64e-4 / (64 * 1.0001), 1e-9);
  const double luminance = (2 * 0.01 * 0.02 + 1e-4) / (0.01 * 0.01 + 0.02 * 0.02 + 1e-4);
  EXPECT_NEAR(ssim(truth, restored), (1 + luminance) / 2, 1e-7);
}

TEST(ImageMetrics, OfTheTruthItself) {
  const Volumes v;
  EXPECT_EQ(nmse(v.truth, v.truth), 0);
  EXPECT_TRUE(std::isinf(psnr(v.truth, v.truth)));
  EXPECT_DOUBLE_EQ(ssim(v.truth, v.truth), 1);
}

TEST(ImageMetrics, Errors) {
  const Volumes v;
  EXPECT_ERROR(psnr(v.truth, Tensor::zeros({3, 11, 8})), Shape,
               "[psnr] expected two volumes [slices, height, width] alike, got [3, 11, 9] and [3, 11, 8]");
  EXPECT_ERROR(nmse(Tensor::zeros({9}), Tensor::zeros({9})), Shape, "[nmse] expected two volumes");
  EXPECT_ERROR(ssim(Tensor::zeros({1, 6, 9}), Tensor::zeros({1, 6, 9})), Shape,
               "[ssim] expected slices of at least 7 x 7, got [1, 6, 9]");
}

}  // namespace
}  // namespace torus
