#include "torus/core/tensor.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <numeric>
#include <sstream>

#include "core/expect_error.h"
#include "torus/core/parallel.h"
#include "torus/core/random.h"

namespace torus {
namespace {

// A dense array that rebuilds itself for every view: what a Tensor must look like.
struct Array {
  std::vector<int64_t> shape;
  std::vector<int64_t> values;

  static int64_t count(const std::vector<int64_t>& shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }

  // The array whose element at `index` is ours at old_index(index).
  template <class F>
  Array map(const std::vector<int64_t>& new_shape, F&& old_index) const {
    Array result{new_shape, {}};
    for (int64_t flat = 0; flat < count(new_shape); ++flat) {
      std::vector<int64_t> index(new_shape.size());
      int64_t rest = flat;
      for (size_t axis = new_shape.size(); axis-- > 0; rest /= new_shape[axis])
        index[axis] = rest % new_shape[axis];
      const std::vector<int64_t> old = old_index(index);
      int64_t place = 0;
      for (size_t axis = 0; axis < shape.size(); ++axis) place = place * shape[axis] + old[axis];
      result.values.push_back(values[static_cast<size_t>(place)]);
    }
    return result;
  }
};

Shape shape_of(const std::vector<int64_t>& sizes) { return Shape(std::span<const int64_t>(sizes)); }

int pick(int64_t below) { return static_cast<int>(*rc::gen::inRange<int64_t>(0, below)); }

// Applies one random view to both.
void step(Tensor& tensor, Array& array) {
  const auto axes = static_cast<int>(array.shape.size());
  const int axis = axes ? pick(axes) : 0;
  const auto at = static_cast<size_t>(axis);
  const int named = axes && pick(2) ? axis - axes : axis;  // by its negative number half of the time
  std::vector<int64_t> shape = array.shape;
  switch (pick(8)) {
    case 0: {  // permute
      std::vector<int> order(static_cast<size_t>(axes));
      std::iota(order.begin(), order.end(), 0);
      for (size_t i = order.size(); i > 1; --i)
        std::swap(order[i - 1], order[static_cast<size_t>(pick(static_cast<int64_t>(i)))]);
      for (size_t i = 0; i < order.size(); ++i) shape[i] = array.shape[static_cast<size_t>(order[i])];
      tensor = tensor.permute(order);
      array = array.map(shape, [&](const auto& index) {
        std::vector<int64_t> old(index.size());
        for (size_t i = 0; i < order.size(); ++i) old[static_cast<size_t>(order[i])] = index[i];
        return old;
      });
      break;
    }
    case 1: {  // slice
      if (!axes) return;
      const int64_t first = pick(array.shape[at] + 1), last = first + pick(array.shape[at] - first + 1),
                    by = 1 + pick(3);
      const bool negative = first > 0 && last < array.shape[at] && pick(2);
      shape[at] = (last - first + by - 1) / by;
      tensor = negative ? tensor.slice(named, first - array.shape[at], last - array.shape[at], by)
                        : tensor.slice(named, first, last, by);
      array = array.map(shape, [&](auto index) {
        index[at] = first + index[at] * by;
        return index;
      });
      break;
    }
    case 2: {  // select
      if (!axes || array.shape[at] == 0) return;
      const int64_t index_at = pick(array.shape[at]);
      shape.erase(shape.begin() + axis);
      tensor = tensor.select(named, pick(2) ? index_at : index_at - array.shape[at]);
      array = array.map(shape, [&](auto index) {
        index.insert(index.begin() + axis, index_at);
        return index;
      });
      break;
    }
    case 3: {  // unsqueeze, expand
      if (axes > 4) return;
      const int64_t size = pick(3);
      tensor = tensor.unsqueeze(axis);
      shape.insert(shape.begin() + axis, size);
      tensor = tensor.expand(shape_of(shape));
      array = array.map(shape, [&](auto index) {
        index.erase(index.begin() + axis);
        return index;
      });
      break;
    }
    case 4: {  // transpose
      if (!axes) return;
      const int other = pick(axes);
      std::swap(shape[at], shape[static_cast<size_t>(other)]);
      tensor = tensor.transpose(named, other);
      array = array.map(shape, [&](auto index) {
        std::swap(index[at], index[static_cast<size_t>(other)]);
        return index;
      });
      break;
    }
    case 5: {  // reshape: join two neighbours
      if (axis + 1 >= axes) return;
      shape[at] *= shape[at + 1];
      shape.erase(shape.begin() + axis + 1);
      tensor = tensor.reshape(shape_of(shape));
      array.shape = shape;
      break;
    }
    case 6: {  // reshape: split an axis, the size of one part left to find
      if (!axes || axes > 4 || array.shape[at] % 2 || Array::count(array.shape) == 0) return;
      shape[at] /= 2;
      shape.insert(shape.begin() + axis, 2);
      array.shape = shape;
      shape[at + 1] = -1;
      tensor = tensor.reshape(shape_of(shape));
      break;
    }
    case 7: {  // squeeze
      if (!axes || array.shape[at] != 1) return;
      shape.erase(shape.begin() + axis);
      tensor = tensor.squeeze(named);
      array.shape = shape;
      break;
    }
  }
}

RC_GTEST_PROP(Tensor, ViewsMatchADenseArray, ()) {
  Array array;
  for (int axis = pick(5); axis-- > 0;) array.shape.push_back(1 + pick(6));
  array.values.resize(static_cast<size_t>(Array::count(array.shape)));
  std::iota(array.values.begin(), array.values.end(), int64_t{0});
  Tensor tensor = Tensor::from(array.values, shape_of(array.shape));
  for (int steps = pick(7); steps-- > 0;) {
    step(tensor, array);
    RC_ASSERT(tensor.shape() == shape_of(array.shape));
    RC_ASSERT(tensor.to_vector<int64_t>() == array.values);
    RC_ASSERT(tensor.contiguous().is_contiguous());
    // Written through a view that turns the axes around, the elements land where they belong.
    std::vector<int> around(static_cast<size_t>(tensor.dim()));
    std::iota(around.rbegin(), around.rend(), 0);
    Tensor copy = Tensor::zeros(tensor.shape(), f64);
    copy.permute(around).copy_(tensor.permute(around));
    RC_ASSERT(copy.to_vector<int64_t>() == array.values);
  }
}

TEST(Tensor, Factories) {
  EXPECT_EQ(Tensor::zeros({2, 3}).to_vector<float>(), std::vector<float>(6, 0.f));
  EXPECT_EQ(Tensor::full({2}, 2.5, bf16).to_vector<double>(), (std::vector<double>{2.5, 2.5}));
  EXPECT_EQ(Tensor::arange(3).dtype(), i64);
  EXPECT_EQ(Tensor::arange(3, f16).to_vector<float>(), (std::vector<float>{0, 1, 2}));
  EXPECT_EQ(Tensor::from({1.5, 2.5}).dtype(), f64);
  EXPECT_EQ(Tensor::from(std::vector<uint8_t>{1, 0}, {2, 1}).dtype(), u8);
  EXPECT_EQ(Tensor::scalar(3).shape(), Shape{});
  EXPECT_EQ(Tensor::scalar(3).item(), 3);
  EXPECT_EQ(Tensor::empty({0, 5}).numel(), 0);
  EXPECT_FALSE(Tensor().defined());
  EXPECT_ERROR(Tensor::from(std::vector<float>{1, 2}, {3}), Shape, "[from] shape [3] needs 3 values, got 2");
  EXPECT_ERROR(Tensor::empty({2, -1}), Shape, "[empty]");
  EXPECT_ERROR(Tensor::empty({int64_t{1} << 62, 4}), Shape, "more than 2^63");
  EXPECT_ERROR(Tensor::empty({int64_t{1} << 61}, f64), Memory, "more than 2^63 bytes");
}

TEST(Tensor, SharesStorageAndCountsWrites) {
  Tensor base = Tensor::arange(12, f32).reshape({3, 4});
  Tensor row = base.select(0, 1);
  EXPECT_EQ(row.storage(), base.storage());
  const uint64_t before = base.version();
  EXPECT_EQ(row.data<float>()[2], 6);
  EXPECT_EQ(base.version(), before);
  row.fill_(7);
  EXPECT_GT(base.version(), before);
  EXPECT_EQ(base.to_vector<int>()[5], 7);
  EXPECT_EQ(base.to_vector<int>()[8], 8);
  Tensor copy = base.clone();
  copy.fill_(0);
  EXPECT_EQ(base.to_vector<int>()[5], 7);
  EXPECT_EQ(base.to(f32).storage(), base.storage());
  EXPECT_NE(base.transpose(0, 1).contiguous().storage(), base.storage());
  // Reshaping copies only where strides force it to: those of axes of size 1 do not.
  const Tensor part = Tensor::arange(96).reshape({4, 1, 3, 8}).slice(3, 2, 4), joined = part.reshape({12, 2});
  EXPECT_EQ(joined.storage(), part.storage());
  EXPECT_EQ(joined.to_vector<int>(), part.to_vector<int>());
  EXPECT_NE(part.reshape({4, 6}).storage(), part.storage());
}

TEST(Tensor, ConvertsBetweenAllDtypes) {
  const std::vector<DType> all = {f64, f32, f16, bf16, i64, i32, u8, boolean};
  const Tensor values = Tensor::from({0., 1., 2., 100.}).reshape({2, 2});
  for (DType from : all)
    for (DType to : all) {
      const Tensor source = values.to(from).transpose(0, 1), result = source.to(to);
      EXPECT_EQ(result.dtype(), to);
      const bool truth = from == boolean || to == boolean;
      const std::vector<double> expected =
          truth ? std::vector<double>{0, 1, 1, 1} : std::vector<double>{0, 2, 1, 100};
      EXPECT_EQ(result.to_vector<double>(), expected) << from << " to " << to;
    }
  EXPECT_EQ(Tensor::from({-1.9, 2.9, 0.5}).to(i32).to_vector<int>(), (std::vector<int>{-1, 2, 0}));
  EXPECT_EQ(Tensor::from({-0.5, 0., 1e-30}).to(boolean).to_vector<bool>(),
            (std::vector<bool>{true, false, true}));
  // Small halves are not zero: conversion to bool looks at the value.
  EXPECT_EQ(Tensor::from({6e-8}).to(f16).to(boolean).to_vector<bool>(), std::vector<bool>{true});
  EXPECT_EQ(Tensor::from({int64_t{1} << 53 | 1}).to_vector<int64_t>(),
            std::vector<int64_t>{(int64_t{1} << 53) + 1});
}

TEST(Tensor, CopyBroadcasts) {
  Tensor target = Tensor::zeros({2, 3});
  target.copy_(Tensor::from({1, 2, 3}));
  EXPECT_EQ(target.to_vector<int>(), (std::vector<int>{1, 2, 3, 1, 2, 3}));
  EXPECT_ERROR(target.copy_(Tensor::zeros({4})), Shape, "[expand] [4] does not expand to [2, 3]");
}

TEST(Tensor, Errors) {
  const Tensor tensor = Tensor::zeros({2, 3});
  EXPECT_ERROR(tensor.size(2), Shape, "axis must be in [-2, 2), got 2");
  EXPECT_ERROR(tensor.transpose(0, -3), Shape, "[transpose]");
  EXPECT_ERROR(tensor.permute({0}), Shape, "[permute] expected 2 axes, got 1");
  EXPECT_ERROR(tensor.permute({1, -1}), Shape, "comes twice");
  EXPECT_ERROR(tensor.slice(1, 0, 4), Shape, "outside axis 1 of [2, 3]");
  EXPECT_ERROR(tensor.slice(1, 2, 1), Shape, "[slice]");
  EXPECT_ERROR(tensor.slice(1, -4, 1), Shape, "[slice]");
  EXPECT_ERROR(tensor.slice(1, 0, 1, 0), Shape, "step must be positive");
  EXPECT_ERROR(tensor.select(0, 2), Shape, "index 2 is outside axis 0");
  EXPECT_ERROR(tensor.select(0, -3), Shape, "[select]");
  EXPECT_ERROR(tensor.squeeze(0), Shape, "[squeeze]");
  EXPECT_ERROR(tensor.unsqueeze(3), Shape, "[unsqueeze]");
  EXPECT_ERROR(tensor.reshape({4}), Shape, "[reshape]");
  EXPECT_ERROR(tensor.reshape({-1, 4}), Shape, "does not fit");
  EXPECT_ERROR(tensor.reshape({-1, -1}), Shape, "[reshape]");
  EXPECT_ERROR(tensor.reshape({-1, int64_t{1} << 40, int64_t{1} << 40}), Shape, "2^63");
  EXPECT_ERROR(Tensor::zeros({0}).reshape({-1, 0}), Shape, "does not fit");
  EXPECT_ERROR(tensor.expand({3}), Shape, "more axes");
  EXPECT_ERROR(tensor.expand({2, 4}), Shape, "does not expand");
  EXPECT_ERROR(Tensor::zeros({1}).expand({-1}), Shape, "does not expand");
  EXPECT_ERROR(tensor.item(), Shape, "expected one element");
  EXPECT_ERROR(tensor.data<double>(), DType, "the tensor is f32, asked for as f64");
  EXPECT_ERROR(Tensor().data<float>(), Value, "undefined");
  EXPECT_ERROR((Tensor::zeros({1, 1, 1, 1, 1, 1, 1, 1}).unsqueeze(0)), Shape, "at most 8 axes");
  EXPECT_ERROR(tensor.to(Device{DeviceKind::cuda, 0}), Device, "cuda");
}

TEST(Tensor, EmptyViews) {
  const Tensor tensor = Tensor::zeros({3, 0, 2});
  EXPECT_EQ(tensor.slice(0, 1, 3).to_vector<float>().size(), 0u);
  EXPECT_EQ(tensor.select(0, 2).shape(), (Shape{0, 2}));
  EXPECT_EQ(tensor.select(0, 2).clone().numel(), 0);
  EXPECT_EQ(tensor.reshape({0, 7}).shape(), (Shape{0, 7}));
  EXPECT_EQ(sum_to(tensor, {3, 1, 2}).to_vector<float>(), std::vector<float>(6, 0.f));
}

TEST(Tensor, Prints) {
  const auto print = [](const Tensor& tensor) {
    std::ostringstream out;
    out << tensor;
    return out.str();
  };
  EXPECT_EQ(print(Tensor::from({1.5f, 2.f})), "[1.5, 2]\nf32 [2] on cpu");
  EXPECT_EQ(print(Tensor::arange(4).reshape({2, 2})), "[[0, 1],\n [2, 3]]\ni64 [2, 2] on cpu");
  EXPECT_EQ(print(Tensor::arange(9, u8)), "[0, 1, 2, ..., 6, 7, 8]\nu8 [9] on cpu");
  EXPECT_EQ(print(Tensor::arange(8, i32)), "[0, 1, 2, 3, 4, 5, 6, 7]\ni32 [8] on cpu");
  EXPECT_EQ(print(Tensor::scalar(1, boolean)), "true\nbool [] on cpu");
  EXPECT_EQ(print(Tensor::from({0.5}).to(f16)), "[0.5]\nf16 [1] on cpu");
  EXPECT_EQ(print(Tensor::zeros({0})), "[]\nf32 [0] on cpu");
  EXPECT_EQ(print(Tensor()), "undefined tensor");
}

TEST(Tensor, AddInto) {
  Tensor sum = Tensor::arange(6, f32).reshape({2, 3});
  add_into(sum, Tensor::from({10.f, 20.f, 30.f}));
  EXPECT_EQ(sum.to_vector<int>(), (std::vector<int>{10, 21, 32, 13, 24, 35}));
  Tensor turned = sum.transpose(0, 1);
  add_into(turned, sum.clone().transpose(0, 1));
  EXPECT_EQ(sum.to_vector<int>(), (std::vector<int>{20, 42, 64, 26, 48, 70}));
  EXPECT_ERROR(add_into(sum, Tensor::zeros({3}, f64)), DType, "[add_into] expected f32, got f64");
}

// Every way to broadcast [a, b, c]: each axis stretched or not, leading axes present or not.
TEST(Tensor, SumToUndoesBroadcast) {
  const Tensor full = randn({3, 4, 5}, 0, 1, f64);
  const std::vector<double> values = full.to_vector<double>();
  for (int leading = 0; leading <= 3; ++leading)
    for (int stretched = 0; stretched < 8; ++stretched) {
      Shape shape;
      for (int axis = leading; axis < 3; ++axis) shape.push_back(stretched >> axis & 1 ? 1 : full.size(axis));
      std::vector<double> expected(static_cast<size_t>(shape.numel()), 0.);
      for (size_t flat = 0; flat < values.size(); ++flat) {
        const int64_t index[3] = {static_cast<int64_t>(flat) / 20, static_cast<int64_t>(flat) / 5 % 4,
                                  static_cast<int64_t>(flat) % 5};
        int64_t place = 0;
        for (int axis = leading; axis < 3; ++axis)
          place = place * shape[axis - leading] + (stretched >> axis & 1 ? 0 : index[axis]);
        expected[static_cast<size_t>(place)] += values[flat];
      }
      const std::vector<double> got = sum_to(full, shape).to_vector<double>();
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-12);
      // The same through strides that are not row-major.
      const Tensor turned = full.permute({2, 0, 1}).contiguous().permute({1, 2, 0});
      const std::vector<double> again = sum_to(turned, shape).to_vector<double>();
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(again[i], expected[i], 1e-12);
    }
  EXPECT_ERROR(sum_to(full, {2, 5}), Shape, "[sum_to]");
  // 4096 ones in bf16 would stop growing at 256 if the sum itself were bf16.
  EXPECT_EQ(sum_to(Tensor::full({4096}, 1, bf16), {}).item(), 4096);
}

TEST(Tensor, SumBitsDoNotDependOnThreads) {
  const Tensor values = randn({5000, 33});
  const int threads = num_threads();
  std::vector<std::vector<float>> results;
  for (int count : {1, 2, 3, 7}) {
    set_num_threads(count);
    results.push_back(sum_to(values, {33}).to_vector<float>());
  }
  set_num_threads(threads);
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
}

TEST(Shape, Broadcast) {
  EXPECT_EQ(broadcast_shapes("op", {2, 1, 4}, {3, 1}), (Shape{2, 3, 4}));
  EXPECT_EQ(broadcast_shapes("op", {}, {3}), (Shape{3}));
  EXPECT_EQ(broadcast_shapes("op", {0, 1}, {1, 5}), (Shape{0, 5}));
  EXPECT_ERROR(broadcast_shapes("op", {2, 3}, {4, 3}), Shape,
               "[op] shapes [2, 3] and [4, 3] do not broadcast: axis -2 has 2 and 4");
  EXPECT_ERROR(broadcast_shapes("op", {0}, {2}), Shape, "do not broadcast");
}

}  // namespace
}  // namespace torus
