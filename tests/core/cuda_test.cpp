// The CUDA device against the CPU: memory, copies, kernels of tensors, products. Skipped without a device.
#include <gtest/gtest.h>

#include <cmath>

#include "core/expect_error.h"
#include "torus/core/gemm.h"
#include "torus/core/memory.h"
#include "torus/core/random.h"
#include "torus/core/tensor.h"

namespace torus {
namespace {

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  }
};
using CudaTensor = Cuda;
using CudaProduct = Cuda;
using CudaMemory = Cuda;

double difference(const Tensor& got, const Tensor& expected) {
  const auto a = got.to_vector<double>(), b = expected.to_vector<double>();
  if (got.shape() != expected.shape()) return INFINITY;
  double sum = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]), norm += b[i] * b[i];
  return sum == 0 ? 0 : std::sqrt(sum / norm);
}

const std::vector<Shape> shapes = {{},        {0},      {1},          {7},        {3, 1, 5},
                                   {2, 0, 3}, {64, 33}, {5, 4, 3, 2}, {1000, 129}};

TEST_F(CudaTensor, CopiesThereAndBackKeepEveryBitOfEveryDtype) {
  for (DType dtype : {f64, f32, f16, bf16, i64, i32, u8, boolean})
    for (const Shape& shape : shapes) {
      const Tensor x = randint(shape, -100, 100).to(dtype);
      EXPECT_EQ(x.to(cuda).to(cpu).to_vector<double>(), x.to_vector<double>()) << dtype << shape;
    }
}

TEST_F(CudaTensor, LargeCopiesGoThroughAllBuffers) {
  const Tensor x = randint({(40 << 20) + 3}, 0, 255).to(u8);
  const Tensor y = x.to(cuda), z = y.clone();
  EXPECT_EQ(z.to_vector<uint8_t>(), x.to_vector<uint8_t>());
}

TEST_F(CudaTensor, StridedCopies) {
  for (DType dtype : {f64, f32, bf16, u8}) {
    const Tensor x = randint({6, 10, 16, 32}, 0, 100).to(dtype), y = x.to(cuda);
    const auto same = [&](const Tensor& a, const Tensor& b) {
      EXPECT_EQ(a.contiguous().to_vector<double>(), b.contiguous().to_vector<double>()) << dtype << a.shape();
      EXPECT_EQ(a.to(cpu).to_vector<double>(), b.to_vector<double>()) << dtype << a.shape();
    };
    same(y.transpose(1, 2), x.transpose(1, 2));
    same(y.permute({3, 1, 0, 2}), x.permute({3, 1, 0, 2}));
    same(y.slice(3, 3, 20), x.slice(3, 3, 20));
    same(y.slice(3, 16, 32), x.slice(3, 16, 32));
    same(y.slice(2, 1, 15, 3), x.slice(2, 1, 15, 3));
    same(y.select(1, 4).unsqueeze(0).expand({5, 6, 16, 32}),
         x.select(1, 4).unsqueeze(0).expand({5, 6, 16, 32}));
    Tensor into = Tensor::zeros(x.shape(), dtype, cuda), expected = Tensor::zeros(x.shape(), dtype);
    into.slice(3, 5, 9).copy_(x.slice(3, 0, 4));
    expected.slice(3, 5, 9).copy_(x.slice(3, 0, 4));
    into.transpose(0, 1).select(0, 3).copy_(y.transpose(0, 1).select(0, 2));
    expected.transpose(0, 1).select(0, 3).copy_(x.transpose(0, 1).select(0, 2));
    same(into, expected);
  }
}

TEST_F(CudaTensor, ConvertsAsTheCpuDoes) {
  const Tensor x = rand({33, 17}, -70, 70, f64);
  for (DType from : {f64, f32, f16, bf16, i64, i32, boolean})
    for (DType to : {f64, f32, f16, bf16, i64, i32, boolean}) {
      const Tensor a = x.to(from);
      EXPECT_EQ(a.to(cuda).to(to).to_vector<double>(), a.to(to).to_vector<double>()) << from << " to " << to;
    }
}

TEST_F(CudaTensor, Fills) {
  for (DType dtype : {f64, f32, f16, bf16, i64, i32, u8, boolean}) {
    Tensor x = Tensor::full({5, 7}, 3, dtype, cuda), expected = Tensor::full({5, 7}, 3, dtype);
    x.slice(1, 2, 4).fill_(1);
    expected.slice(1, 2, 4).fill_(1);
    EXPECT_EQ(x.to_vector<double>(), expected.to_vector<double>()) << dtype;
    EXPECT_EQ(Tensor::zeros({3, 1000}, dtype, cuda).to_vector<double>(), std::vector<double>(3000)) << dtype;
  }
}

TEST_F(CudaTensor, AddsIntoEveryStride) {
  const Tensor a = randn({6, 50, 33}, 0, 1, f64), b = randn({50, 1}, 0, 1, f64);
  for (DType dtype : {f64, f32}) {
    Tensor expected = a.to(dtype).clone(), got = a.to(dtype).to(cuda).clone();
    add_into(expected, b.to(dtype));
    add_into(got, b.to(dtype).to(cuda));
    EXPECT_LT(difference(got, expected), 1e-15);
    Tensor turned = got.transpose(0, 2), turned_expected = expected.transpose(0, 2);
    add_into(turned, turned.clone());
    add_into(turned_expected, turned_expected.clone());
    EXPECT_LT(difference(got, expected), 1e-15);
  }
  Tensor here = a.clone();
  EXPECT_ERROR(add_into(here, a.to(cuda)), Device, "[add_into] expected cpu, got cuda:0");
}

TEST_F(CudaTensor, SumsOverAnyAxes) {
  for (DType dtype : {f64, f32, f16, bf16}) {
    const double tolerance = dtype == f64 ? 1e-14 : dtype == f32 ? 1e-6 : dtype == f16 ? 1e-3 : 1e-2;
    const auto agree = [&](const Shape& shape, const Shape& to, const std::vector<int>& order) {
      const Tensor x = randn(shape, 0.5, 1, dtype).permute(order), y = x.to(cuda);
      const Tensor got = sum_to(y, to, 3);
      EXPECT_LT(difference(got, sum_to(x, to, 3)), tolerance) << dtype << shape << to;
      EXPECT_EQ(sum_to(y, to, 3).to_vector<double>(), got.to_vector<double>());
    };
    agree({300, 200}, {1, 200}, {0, 1});
    agree({300, 200}, {300, 1}, {0, 1});
    agree({300, 200}, {200}, {0, 1});
    agree({300, 203}, {203}, {0, 1});
    agree({200, 300}, {1, 200}, {1, 0});
    agree({40, 5, 64}, {1, 5, 1}, {0, 1, 2});
    agree({40, 5, 64}, {40, 1, 64}, {0, 1, 2});
    agree({40, 5, 64}, {5, 1, 1}, {1, 0, 2});
    agree({40, 5, 64}, {1, 1, 1}, {2, 0, 1});
    agree({100000}, {}, {0});
    agree({20000, 64}, {64}, {0, 1});
    agree({3, 100000}, {3, 1}, {0, 1});
    agree({4, 0}, {4, 1}, {0, 1});
    for (const Shape& shape : {Shape{1, 384},
                               {15, 128},
                               {17, 1536},
                               {1000, 1152},
                               {1000, 1153},
                               {5001, 8},
                               {3, 70000},
                               {33001, 16},
                               {2500, 768},
                               {40000, 136},
                               {700, 9216}})
      agree(shape, {shape[1]}, {0, 1});
    agree({300, 2, 128}, {128}, {0, 1, 2});
    agree({2, 300, 128}, {128}, {1, 0, 2});
    // Views: rows with gaps, rows that do not begin on multiples of 16 bytes, rows in another order.
    const Tensor x = randn({70, 30, 136}, 0.5, 1, dtype), y = x.to(cuda);
    using View = Tensor (*)(const Tensor&);
    for (const View view : {View([](const Tensor& t) { return t.slice(2, 0, 128); }),
                            View([](const Tensor& t) { return t.slice(2, 1, 129); }),
                            View([](const Tensor& t) { return t.transpose(0, 1); }),
                            View([](const Tensor& t) { return t.transpose(0, 1).slice(2, 3, 130); })}) {
      const Tensor got = sum_to(view(y), {view(y).size(2)}, 3);
      EXPECT_LT(difference(got, sum_to(view(x), {view(x).size(2)}, 3)), tolerance)
          << dtype << view(x).strides();
      EXPECT_EQ(sum_to(view(y), {view(y).size(2)}, 3).to_vector<double>(), got.to_vector<double>());
    }
  }
}

TEST_F(CudaTensor, PassesTwoToTheThirtyFirstElements) {
  const int64_t count = (int64_t{1} << 31) + 77;
  Tensor x = Tensor::zeros({count}, u8, cuda);
  x.slice(0, count - 3, count).fill_(7);
  EXPECT_EQ(x.slice(0, count - 5, count).to_vector<int64_t>(), (std::vector<int64_t>{0, 0, 7, 7, 7}));
  const Tensor y = x.slice(0, 0, count, 2).to(f16);
  EXPECT_EQ(y.slice(0, y.numel() - 3, y.numel()).to_vector<double>(), (std::vector<double>{0, 7, 7}));
  EXPECT_EQ(sum_to(y.to(f32), {}).item(), 14);
}

TEST_F(CudaProduct, AgreesWithTheCpu) {
  const std::vector<std::array<int64_t, 3>> sizes = {{1, 1, 1},     {3, 5, 7},      {64, 64, 64},
                                                     {129, 65, 33}, {1, 300, 50},   {300, 1, 50},
                                                     {50, 300, 1},  {256, 512, 128}};
  for (DType dtype : {f64, f32, f16, bf16}) {
    const double tolerance = dtype == f64 ? 1e-14 : dtype == f32 ? 1e-6 : dtype == f16 ? 2e-3 : 1e-2;
    for (const auto& [m, n, k] : sizes)
      for (int transposes = 0; transposes < 4; ++transposes)
        for (bool with_bias : {false, true})
          for (bool accumulate : {false, true}) {
            const auto matrix = [&](int64_t rows, int64_t columns, bool turned) {
              return turned ? randn({columns, rows}, 0, 1, dtype).transpose(0, 1)
                            : randn({rows, columns}, 0, 1, dtype);
            };
            const Tensor a = matrix(m, k, transposes & 1), b = matrix(k, n, transposes & 2);
            const Tensor bias = with_bias ? randn({n}, 0, 1, dtype) : Tensor();
            Tensor expected = randn({m, n}, 0, 1, dtype), got = expected.to(cuda);
            const auto there = [&](const Tensor& x, bool turned) {  // with the same strides
              return turned ? x.transpose(0, 1).to(cuda).transpose(0, 1) : x.to(cuda);
            };
            product(expected, a, b, {.accumulate = accumulate, .bias = bias});
            product(got, there(a, transposes & 1), there(b, transposes & 2),
                    {.accumulate = accumulate, .bias = with_bias ? bias.to(cuda) : bias});
            EXPECT_LT(difference(got, expected), tolerance)
                << dtype << " " << m << " " << n << " " << k << " " << transposes << with_bias << accumulate;
            if (accumulate || m * n < 100) continue;  // sums may cancel
            const Tensor addend = randn({m, n}, 0, 1, dtype);
            product(expected, a, b, {.bias = bias, .addend = addend});
            product(got, there(a, transposes & 1), there(b, transposes & 2),
                    {.bias = with_bias ? bias.to(cuda) : bias,
                     .addend = transposes & 1 ? there(addend.transpose(0, 1).clone().transpose(0, 1), true)
                                              : addend.to(cuda)});
            EXPECT_LT(difference(got, expected), tolerance)
                << dtype << " " << m << " " << n << " " << k << " " << transposes << with_bias;
          }
  }
}

// c, and what GELU was given. Of 16 bits alone, and small ones need not be possible.
TEST_F(CudaProduct, GeluOnTheWay) {
  for (DType dtype : {f16, bf16, f32})
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{512, 256, 128}, {40, 72, 64}, {40, 33, 64}})
      for (bool with_bias : {false, true}) {
        const Tensor a = randn({m, k}, 0, 0.1, dtype).to(cuda), b = randn({n, k}, 0, 1, dtype).to(cuda);
        const Tensor bias = with_bias ? randn({n}, 0, 1, dtype).to(cuda) : Tensor();
        const auto result = [&] { return Tensor::empty({m, n}, dtype, cuda); };
        Tensor c = result(), input = result(), expected = result();
        const double tolerance = dtype == f16 ? 2e-3 : 1e-2;
        product(expected, a, b.transpose(0, 1), {.bias = bias});
        const bool done = product_gelu(c, input, a, b.transpose(0, 1), bias);
        if (m == 512) {
          EXPECT_EQ(done, dtype != f32) << dtype << with_bias;
        }
        if (!done) continue;
        EXPECT_LT(difference(input, expected), tolerance) << dtype << m << with_bias;
        auto x = expected.to_vector<double>();
        for (double& v : x) v *= 0.5 * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
        EXPECT_LT(difference(c, Tensor::from(x, {m, n})), tolerance) << dtype << m << with_bias;
      }
}

// Algorithms of large products of 16 bits are chosen by measurement, which a capture has to do without: the
// product is met there first, with the algorithm that is the measure of all bits.
TEST_F(CudaProduct, MeasurementChangesNoBitAndLeavesNothing) {
  const int64_t m = 1100, n = 1536, k = 768;
  for (DType dtype : {f16, bf16})
    for (int kind = 0; kind < 12; ++kind) {
      const bool adds = kind & 4, gelu = kind & 8, odd = kind == 1;
      const auto matrix = [&](int64_t rows, int64_t columns, bool turned) {
        const Tensor x =
            randn({turned ? columns : rows, (turned ? rows : columns) + (odd ? 8 : 0)}, 0, 1, dtype)
                .to(cuda)
                .slice(1, 0, turned ? rows : columns);
        return turned ? x.transpose(0, 1) : x;
      };
      const Tensor a = matrix(m, k, !gelu && kind & 1), b = matrix(k, n, kind & 2);
      const Tensor bias = kind & 1 ? randn({n}, 0, 1, dtype).to(cuda) : Tensor(),
                   before = matrix(m, n, false);
      const std::string label = "kind " + std::to_string(kind);
      Tensor results[3], inputs[3];
      for (int i = 0; i < 3; ++i) {
        results[i] = before.clone();
        inputs[i] = before.clone();
      }
      const auto multiply = [&](int i) {
        if (gelu) {
          EXPECT_TRUE(product_gelu(results[i], inputs[i], a, b, bias)) << label;
        } else {
          product(results[i], a, b, {.accumulate = adds, .bias = bias});
        }
      };
      std::string why_not;
      const auto graph = capture(
          cuda, 1 << 20, [&] { multiply(0); }, why_not);
      EXPECT_TRUE(graph) << why_not;
      release_cached_memory(cuda);
      reset_peak_memory(cuda);
      const MemoryStats unmeasured = memory_stats(cuda);
      multiply(1);
      const MemoryStats measured = memory_stats(cuda);
      multiply(2);
      EXPECT_EQ(measured.live_bytes, unmeasured.live_bytes) << label;
      EXPECT_EQ(measured.peak_bytes, unmeasured.peak_bytes) << label;
      EXPECT_LE(measured.cached_bytes, unmeasured.cached_bytes + (1 << 20)) << label;
      for (int i = 1; i < 3; ++i) {
        EXPECT_EQ(results[i].to_vector<double>(), results[0].to_vector<double>()) << dtype << label << i;
        EXPECT_EQ(inputs[i].to_vector<double>(), inputs[0].to_vector<double>()) << dtype << label << i;
      }
      Tensor exact = before.to(f64).clone();
      product(exact, a.to(f64), b.to(f64),
              {.accumulate = adds, .bias = bias.defined() ? bias.to(f64) : bias});
      EXPECT_LT(difference(gelu ? inputs[0] : results[0], exact), dtype == f16 ? 5e-4 : 4e-3) << label;
    }
}

TEST_F(CudaProduct, BatchesOfAnyStride) {
  const Tensor a = randn({3, 1, 4, 5, 6}, 0, 1, f64), b = randn({2, 4, 6, 7}, 0, 1, f64);
  Tensor expected = Tensor::empty({3, 2, 4, 5, 7}, f64), got = Tensor::empty({3, 2, 4, 5, 7}, f64, cuda);
  product(expected, a, b);
  product(got, a.to(cuda), b.to(cuda));
  EXPECT_LT(difference(got, expected), 1e-14);
  // Heads of [B, N, H, D], and odd offsets.
  const Tensor x = randn({3, 9, 4, 8}, 0, 1, f32), y = x.to(cuda);
  Tensor scores = Tensor::empty({3, 4, 9, 9}), device_scores = Tensor::empty({3, 4, 9, 9}, f32, cuda);
  const auto heads = [](const Tensor& t) { return t.transpose(1, 2).slice(3, 1, 6); };
  product(scores, heads(x), heads(x).transpose(2, 3));
  product(device_scores, heads(y), heads(y).transpose(2, 3));
  EXPECT_LT(difference(device_scores, scores), 1e-6);
  // A result without a unit stride, an expanded operand, and nothing to sum.
  Tensor turned = Tensor::zeros({7, 5}, f64, cuda).transpose(0, 1);
  product(turned, a.select(0, 0).select(0, 0).select(0, 1).to(cuda), b.select(0, 1).select(0, 2).to(cuda));
  Tensor plain = Tensor::zeros({5, 7}, f64);
  product(plain, a.select(0, 0).select(0, 0).select(0, 1), b.select(0, 1).select(0, 2));
  EXPECT_LT(difference(turned, plain), 1e-14);
  Tensor none = Tensor::full({5, 7}, 3, f32, cuda);
  product(none, Tensor::empty({5, 0}, f32, cuda), Tensor::empty({0, 7}, f32, cuda));
  EXPECT_EQ(none.to_vector<double>(), std::vector<double>(35));
  Tensor wide = Tensor::empty({5, 7}, f64, cuda), wide_expected = Tensor::empty({5, 7}, f64);
  const Tensor row = randn({1, 6}, 0, 1, f64);
  product(wide, row.to(cuda).expand({5, 6}), b.select(0, 0).select(0, 0).to(cuda));
  product(wide_expected, row.expand({5, 6}), b.select(0, 0).select(0, 0));
  EXPECT_LT(difference(wide, wide_expected), 1e-14);
}

TEST_F(CudaMemory, CountsAndComesBack) {
  const MemoryStats before = memory_stats(cuda);
  {
    const Tensor x = Tensor::zeros({1000, 1000}, f32, cuda), y = x.slice(0, 0, 10);
    EXPECT_EQ(memory_stats(cuda).live_bytes - before.live_bytes, 4000000);
    EXPECT_EQ(memory_stats(cuda).live_blocks - before.live_blocks, 1);
  }
  EXPECT_EQ(memory_stats(cuda).live_bytes, before.live_bytes);
  release_cached_memory(cuda);
  EXPECT_GE(memory_stats(cuda).cached_bytes, 0);
}

TEST_F(CudaMemory, TooMuchIsOneLineAndHarmless) {
  const int64_t petabyte = int64_t{1} << 50;
  EXPECT_ERROR(Tensor::empty({petabyte}, u8, cuda), Memory,
               "[memory] cannot allocate 1125899906842624 bytes on cuda:0");
  EXPECT_EQ(Tensor::full({3}, 2, f32, cuda).to_vector<float>(), std::vector<float>({2, 2, 2}));
}

TEST_F(CudaMemory, AFullDeviceSaysWhoHoldsIt) {
  const Tensor held = Tensor::zeros({1 << 30}, u8, cuda), one = Tensor::full({1}, 1, f32, cuda);
  const Tensor sum = sum_to(one.expand({1000}), {});
  const int64_t terabyte = int64_t{1} << 40;
  const std::string message = message_of([&] { Tensor::empty({terabyte}, u8, cuda); });
  EXPECT_NE(message.find("bytes on cuda:0, where "), std::string::npos) << message;
  EXPECT_NE(message.find(" are free; tensors hold "), std::string::npos) << message;
  EXPECT_NE(message.find("fill " + std::to_string((1 << 30) + 4) + " (2)"), std::string::npos) << message;
  EXPECT_NE(message.find("sum_to 4 (1)"), std::string::npos) << message;
  // And the program goes on.
  EXPECT_EQ(sum.item(), 1000);
  EXPECT_EQ(held.slice(0, 0, 2).to_vector<int64_t>(), std::vector<int64_t>({0, 0}));
  EXPECT_EQ(Tensor::full({1 << 26}, 1, f32, cuda).select(0, 77).item(), 1);
}

TEST(CudaErrors, AnAbsentDeviceIsOneLine) {
  const int count = cuda_device_count();
  const Device absent{DeviceKind::cuda, count};
  EXPECT_ERROR(Tensor::zeros({1}, f32, absent), Device,
               count > 0 ? "[device] index of cuda must be in [0, " : "[device] no cuda");
}

}  // namespace
}  // namespace torus
