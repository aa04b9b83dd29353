// The fused CUDA kernels of training against the CPU's: norms, cross entropy, embedding, dropout.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <sstream>

#include "core/expect_error.h"
#include "torus/autograd/tape.h"
#include "torus/core/random.h"
#include "torus/ops/ops.h"

namespace torus {
namespace {

class FusedCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  }
};

double difference(const Tensor& got, const Tensor& expected) {
  if (got.shape() != expected.shape() || got.dtype() != expected.dtype()) return INFINITY;
  const auto a = got.to_vector<double>(), b = expected.to_vector<double>();
  double sum = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]), norm += b[i] * b[i];
  return sum == 0 ? 0 : std::sqrt(sum / norm);
}

double tolerance(DType dtype) {
  return dtype == f64 ? 1e-12 : dtype == f32 ? 3e-6 : dtype == f16 ? 1e-3 : 8e-3;
}

// The output and then the gradients of the inputs, for the output's gradient `seed` (undefined: 1).
using Function = std::function<Variable(const std::vector<Variable>&)>;
std::vector<Tensor> results(const Function& function, const std::vector<Tensor>& inputs, const Tensor& seed,
                            Device device) {
  std::vector<Variable> leaves;
  for (const Tensor& input : inputs) leaves.emplace_back(input.to(device), true);
  Tape tape;
  const Variable y = function(leaves);
  std::vector<Tensor> all = {y.value()};
  tape.backward({y}, {seed.defined() ? seed.to(device) : Tensor::full(y.shape(), 1, y.dtype(), device)});
  for (const Variable& leaf : leaves) all.push_back(leaf.grad());
  return all;
}

// On CUDA twice, of equal bits, and as on the CPU.
void expect_same(const std::string& what, const Function& function, const std::vector<Tensor>& inputs,
                 const Tensor& seed = {}) {
  const auto expected = results(function, inputs, seed, cpu), got = results(function, inputs, seed, cuda),
             again = results(function, inputs, seed, cuda);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(got[i].device(), cuda);
    EXPECT_LE(difference(got[i], expected[i]), tolerance(inputs[0].dtype())) << what << ", result " << i;
    EXPECT_EQ(got[i].to_vector<double>(), again[i].to_vector<double>()) << what << ", result " << i;
  }
}

std::string label(DType dtype, const Shape& shape) {
  std::ostringstream text;
  text << dtype << ' ' << shape;
  return text.str();
}

// Widths of two rows a warp, a warp a row, a block a row, more than registers hold, and no multiple of 16
// bytes; rows that a device takes at once, and several times as many and a few.
const std::vector<Shape> row_shapes = {
    {5, 1},    {7, 3},      {300, 64},   {33, 100},   {3, 11, 768}, {19, 1000}, {2, 1024},  {9, 384},
    {5, 2048}, {3, 9000},   {2, 20000},  {2000, 128}, {3000, 7},    {0, 64},    {4, 0},     {1, 384},
    {25, 256}, {6501, 384}, {3301, 768}, {1700, 512}, {900, 1024},  {13, 8192}, {300, 2056}};

TEST_F(FusedCuda, LayerNorm) {
  for (DType dtype : {f64, f32, f16, bf16})
    for (const Shape& shape : row_shapes) {
      const int64_t n = shape.back();
      const Tensor x = randn(shape, 3, 2, dtype), w = randn({n}, 1, 0.3, dtype), b = randn({n}, 0, 1, dtype),
                   g = randn(shape, 0, 1, dtype);
      if (n == 1) continue;  // its gradients are 0 but for rounding
      expect_same(
          label(dtype, shape), [](const auto& v) { return layer_norm(v[0], v[1], v[2]); }, {x, w, b}, g);
      expect_same(
          label(dtype, shape) + " without bias", [](const auto& v) { return layer_norm(v[0], v[1]); }, {x, w},
          g);
      expect_same(
          label(dtype, shape) + " of what others use",
          [](const auto& v) {
            const Variable y = v[0] * 2;
            return y - layer_norm(y, v[1], v[2]);
          },
          {x, w, b}, g);
    }
}

TEST_F(FusedCuda, RmsNorm) {
  for (DType dtype : {f64, f32, f16, bf16})
    for (const Shape& shape : row_shapes) {
      const int64_t n = shape.back();
      const Tensor x = randn(shape, 1, 2, dtype), w = randn({n}, 1, 0.3, dtype),
                   g = randn(shape, 0, 1, dtype);
      if (n == 1) continue;
      expect_same(
          label(dtype, shape), [](const auto& v) { return rms_norm(v[0], v[1]); }, {x, w}, g);
      expect_same(
          label(dtype, shape) + " of what others use",
          [](const auto& v) {
            const Variable y = v[0] * 2;
            return y - rms_norm(y, v[1]);
          },
          {x, w}, g);
    }
}

// One row is one number; and rows that do not begin on multiples of 16 bytes.
TEST_F(FusedCuda, NormsOfOneChannelAndOfViews) {
  const Tensor one = randn({6, 1}, 0, 1, f32).to(cuda), w = Tensor::full({1}, 2, f32, cuda);
  for (double y : layer_norm(one, w, Tensor::full({1}, 0.5, f32, cuda)).value().to_vector<double>())
    EXPECT_EQ(y, 0.5);
  for (DType dtype : {f32, bf16}) {
    const Tensor base = randn({64 * 9 + 1}, 0, 1, dtype), weights = randn({65}, 0, 1, dtype);
    const auto view = [](const Tensor& flat, int64_t rows) {
      return flat.slice(0, 1, rows * 64 + 1).reshape({rows, 64});
    };
    const Tensor there = base.to(cuda), weights_there = weights.to(cuda);
    const Variable expected = layer_norm(view(base, 9), weights.slice(0, 1, 65)),
                   got = layer_norm(view(there, 9), weights_there.slice(0, 1, 65));
    EXPECT_LE(difference(got.value(), expected.value()), tolerance(dtype));
  }
}

Tensor targets_for(const Shape& shape, int64_t vocabulary, bool ignore) {
  Tensor targets = randint(shape, 0, vocabulary);
  if (ignore && targets.numel() > 2) {
    targets.mutable_data<int64_t>()[1] = ignore_none;
    targets.mutable_data<int64_t>()[targets.numel() - 1] = ignore_none;
  }
  return targets;
}

TEST_F(FusedCuda, CrossEntropy) {
  for (DType dtype : {f64, f32, f16, bf16})
    for (const auto& [rows, vocabulary] : {std::pair<int64_t, int64_t>{5, 1},
                                           {300, 7},
                                           {70, 65},
                                           {33, 1000},
                                           {9, 2048},
                                           {5, 2049},
                                           {11, 50304},
                                           {3, 50257}})
      for (double smoothing : {0.0, 0.1})
        for (double spread : {1.0, 20.0}) {
          if (vocabulary == 1) continue;
          const Tensor x = randn({rows, vocabulary}, 0, spread, dtype);
          const Tensor targets = targets_for({rows}, vocabulary, true);
          expect_same(label(dtype, x.shape()),
                      [&](const auto& v) {
                        return cross_entropy(v[0], targets.to(v[0].device()), ignore_none, smoothing);
                      },
                      {x});
        }
  // Of rows that are apart, as those of a product are.
  for (DType dtype : {f32, f16, bf16})
    for (const int64_t vocabulary : {65, 3001}) {
      const Tensor targets = targets_for({40}, vocabulary, true);
      expect_same("of a product",
                  [&](const auto& v) { return cross_entropy(linear(v[0], v[1]), targets.to(v[0].device())); },
                  {randn({40, 24}, 0, 1, dtype), randn({vocabulary, 24}, 0, 0.2, dtype)});
    }
  // No target, no row, one class.
  const Tensor none = Tensor::full({3}, static_cast<double>(ignore_none), i64);
  const auto of = [](const Tensor& targets) {
    return [&targets](const auto& v) { return cross_entropy(v[0], targets.to(v[0].device())); };
  };
  expect_same("ignored", of(none), {randn({3, 9})});
  const Tensor empty = Tensor::zeros({0}, i64), zeros = Tensor::zeros({4}, i64);
  expect_same("empty", of(empty), {Tensor::zeros({0, 9})});
  expect_same("one class", of(zeros), {randn({4, 1})});
}

TEST_F(FusedCuda, CrossEntropyOfExtremes) {
  const Tensor x = Tensor::from<float>({1e4f, -1e4f, 0, 5, 1, -INFINITY, -INFINITY, 3}).reshape({4, 2});
  const Tensor targets = Tensor::from<int64_t>({1, 1, 0, 1});
  expect_same("extremes", [&](const auto& v) { return cross_entropy(v[0], targets.to(v[0].device())); }, {x});
  const Tensor masked = Tensor::from<float>({1, -INFINITY}).reshape({1, 2}).to(cuda);
  const Tensor first = Tensor::from<int64_t>({0}).to(cuda), second = Tensor::from<int64_t>({1}).to(cuda);
  EXPECT_EQ(cross_entropy(masked, first).item(), 0);
  EXPECT_EQ(cross_entropy(masked, first, ignore_none, 0.1).item(), INFINITY);
  EXPECT_EQ(cross_entropy(masked, second).item(), INFINITY);
  const Tensor wrong = Tensor::from<float>({1, NAN}).reshape({1, 2}).to(cuda);
  EXPECT_TRUE(std::isnan(cross_entropy(wrong, first).item()));
}

TEST_F(FusedCuda, FaultsAreReported) {
  const Tensor table = Tensor::zeros({5, 8}, f32, cuda);
  // What comes after reads zeros, whatever was in the memory.
  for (int64_t width : {8, 7}) {
    const Tensor rows =
        embedding(Tensor::full({5, width}, 1, f32, cuda), Tensor::from<int64_t>({5, -1}).to(cuda)).value();
    EXPECT_ERROR(rows.to_vector<double>(), Value, " is outside [0, 5)");
    EXPECT_EQ(rows.to_vector<double>(), std::vector<double>(static_cast<size_t>(2 * width), 0));
  }
  EXPECT_ERROR(embedding(table, Tensor::from<int64_t>({1, 5}).to(cuda)).value().to_vector<double>(), Value,
               "[embedding] index 5 is outside [0, 5)");
  const Tensor logits = Tensor::zeros({2, 5}, f32, cuda);
  EXPECT_ERROR(cross_entropy(logits, Tensor::from<int64_t>({1, -3}).to(cuda)).item(), Value,
               "[cross_entropy] target -3 is outside [0, 5)");
  EXPECT_EQ(embedding(table, Tensor::from<int64_t>({1, 4}).to(cuda)).value().to_vector<double>(),
            std::vector<double>(16, 0));
}

TEST_F(FusedCuda, Embedding) {
  for (DType dtype : {f64, f32, f16, bf16})
    for (const auto& [vocabulary, rows, width] : {std::array<int64_t, 3>{7, 40, 1},
                                                  {7, 1000, 3},
                                                  {65, 5000, 100},
                                                  {2003, 3000, 768},
                                                  {50304, 40000, 8},
                                                  {3, 20, 1000},
                                                  {4, 9000, 2000},
                                                  {1000, 1, 64},
                                                  {5, 0, 4}}) {
      const Tensor table = randn({vocabulary, width}, 0, 1, dtype);
      // Half of the rows take one index: more than a warp sums.
      Tensor indices = randint({rows}, 0, vocabulary);
      for (int64_t i = 0; i < rows; i += 2) indices.mutable_data<int64_t>()[i] = vocabulary / 2;
      expect_same(
          label(dtype, {vocabulary, rows, width}),
          [&](const auto& v) { return embedding(v[0], indices.to(v[0].device())); }, {table},
          randn({rows, width}, 0, 1, dtype));
    }
}

// More parts of a row than there are blocks along y of a grid.
TEST_F(FusedCuda, EmbeddingPassesTwoToTheTwentyFirstColumns) {
  const int64_t width = (1 << 21) + 33;
  const Tensor indices = Tensor::from<int64_t>({2, 0, 2, 1, 2});
  expect_same(
      label(f32, {3, 5, width}), [&](const auto& v) { return embedding(v[0], indices.to(v[0].device())); },
      {randn({3, width})}, randn({5, width}));
}

TEST_F(FusedCuda, DropoutHasTheBitsOfTheCpu) {
  for (DType dtype : {f64, f32, f16, bf16})
    for (int64_t count : {1, 3, 63, 64, 255, 256, 257, 1000, 100000})
      for (double p : {0.1, 0.5, 1.0}) {
        const Tensor x = randn({count}, 0, 1, dtype);
        Generator here(7), there(7);
        here.reserve(12345);
        there.reserve(12345);
        const auto expected = results([&](const auto& v) { return dropout(v[0], p, here); }, {x}, x, cpu);
        const auto got = results([&](const auto& v) { return dropout(v[0], p, there); }, {x}, x, cuda);
        for (size_t i = 0; i < 2; ++i)
          EXPECT_EQ(got[i].to_vector<double>(), expected[i].to_vector<double>()) << dtype << ' ' << count;
        EXPECT_EQ(here.state(), there.state());
      }
  // Added to something, which is one rounding.
  for (DType dtype : {f64, f32, bf16})
    for (int64_t count : {1, 257, 5000}) {
      const Tensor x = randn({count}, 0, 1, dtype), residual = randn({count}, 0, 1, dtype);
      expect_same(
          "residual",
          [](const auto& v) {
            Generator generator(9);
            return dropout(v[0], 0.3, generator, v[1]);
          },
          {x, residual}, x);
    }
  // Not on a multiple of 16 bytes.
  const Tensor base = randn({1001});
  Generator here(8), there(8);
  EXPECT_EQ(dropout(base.to(cuda).slice(0, 1, 1001), 0.3, there).value().to_vector<double>(),
            dropout(base.slice(0, 1, 1001), 0.3, here).value().to_vector<double>());
}

// Where nobody else holds the logits; the place of the gradient tells.
void expect_logits_become_their_gradient(Device device) {
  const Tensor start = randn({20, 33}).to(device), targets = randint({20}, 0, 33).to(device);
  const Variable x(start, true);
  const auto run = [&](bool hold, bool keep_graph) {
    const float *before = nullptr, *after = nullptr;
    Variable held;
    std::vector<double> values;
    Tape tape;
    Variable loss;
    {
      const Variable logits = layer_norm(x, Tensor::full({33}, 1, f32, device));
      before = logits.value().data<float>();
      logits.on_gradient([&](const Tensor& grad) {
        after = grad.data<float>();
        return Tensor();
      });
      loss = cross_entropy(logits, targets);
      if (hold) {
        held = logits;
        values = logits.value().to_vector<double>();
      }
    }
    Variable leaf = x;
    leaf.zero_grad();
    tape.backward(loss, {.keep_graph = keep_graph});
    EXPECT_EQ(before == after, !hold && !keep_graph);
    if (hold) {
      EXPECT_EQ(held.value().to_vector<double>(), values);
    }
    const auto first = x.grad().to_vector<double>();
    if (keep_graph) {
      leaf.zero_grad();
      tape.backward(loss);
      EXPECT_EQ(x.grad().to_vector<double>(), first);
      EXPECT_EQ(before, after);
    }
    return first;
  };
  const auto reused = run(false, false);
  EXPECT_EQ(run(true, false), reused);
  EXPECT_EQ(run(false, true), reused);
}

TEST(CrossEntropy, LogitsBecomeTheirGradient) { expect_logits_become_their_gradient(cpu); }
TEST_F(FusedCuda, LogitsBecomeTheirGradient) { expect_logits_become_their_gradient(cuda); }

}  // namespace
}  // namespace torus
