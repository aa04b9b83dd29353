#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// Where the patches of a grid lie.
struct Patches {
  Shape grid, patch, stride, count;  // one number an axis of the grid
  bool overlap = false, cover = true;

  Patches(const char* op, const Shape& grid_sizes, const std::vector<int64_t>& patch_sizes,
          const std::vector<int64_t>& strides)
      : grid(grid_sizes), patch(patch_sizes), stride(strides.empty() ? patch_sizes : strides) {
    check(grid.dim() >= 1 && grid.dim() <= 3 && patch.dim() == grid.dim() && stride.dim() == grid.dim(),
          Error::Kind::Shape, "[", op,
          "] expected a grid of 1 to 3 axes, and a patch and a stride for each, got grid ", grid, ", patch ",
          patch, ", stride ", stride);
    for (int axis = 0; axis < grid.dim(); ++axis) {
      check(patch[axis] > 0 && stride[axis] > 0 && grid[axis] >= patch[axis] &&
                (grid[axis] - patch[axis]) % stride[axis] == 0,
            Error::Kind::Shape, "[", op, "] patches ", patch, " ", stride, " apart do not fill the grid ",
            grid, " exactly: axis ", axis);
      count.push_back((grid[axis] - patch[axis]) / stride[axis] + 1);
      overlap = overlap || stride[axis] < patch[axis];
      cover = cover && (stride[axis] <= patch[axis] || count[axis] == 1);
    }
  }

  // x [B, C, grid...] as [B, count..., C, patch...]: a view.
  Tensor windows(const Tensor& x) const {
    Shape shape{x.size(0)}, strides{x.strides()[0]};
    for (int axis = 0; axis < grid.dim(); ++axis) {
      shape.push_back(count[axis]);
      strides.push_back(x.strides()[2 + axis] * stride[axis]);
    }
    shape.push_back(x.size(1));
    strides.push_back(x.strides()[1]);
    for (int axis = 0; axis < grid.dim(); ++axis) {
      shape.push_back(patch[axis]);
      strides.push_back(x.strides()[2 + axis]);
    }
    return x.as_strided(shape, strides, x.offset());
  }

  // x [B, C, grid...] to tokens [B, N, C * prod(patch)].
  Tensor unfolded(const Tensor& x) const {
    return windows(x).contiguous().reshape({x.size(0), count.numel(), x.size(1) * patch.numel()});
  }

  // The transpose.
  Tensor folded(const Tensor& tokens) const;
};

// x [B, C, grid...] = the sums of the elements of overlapping patches, in at least f32.
void add_patches_cpu(Tensor& x, const Tensor& tokens, const Shape& patch, const Shape& stride) {
  const Patches patches("fold", x.shape().slice(2, x.dim()), {patch.begin(), patch.end()},
                        {stride.begin(), stride.end()});
  const DType wide = x.dtype() == f64 ? f64 : f32;
  Tensor sums = x.dtype() == wide ? x : Tensor::empty(x.shape(), wide);
  sums.fill_(0);
  const Tensor into = patches.windows(sums), from = tokens.to(wide).reshape(into.shape());
  // The same place in every patch: these do not overlap.
  const int axes = patch.dim(), first = 2 + axes;
  for (int64_t place = 0; place < patch.numel(); ++place) {
    Tensor part = into, with = from;
    int64_t rest = place;
    for (int axis = axes - 1; axis >= 0; --axis) {
      const int64_t at = rest % patch[axis];
      rest /= patch[axis];
      part = part.select(first + axis, at);
      with = with.select(first + axis, at);
    }
    add_into(part, with);
  }
  if (x.dtype() != wide) x.copy_(sums);
}

const Kernel<void(Tensor&, const Tensor&, const Shape&, const Shape&)> add_patches_kernel{"fold",
                                                                                          add_patches_cpu};

Tensor Patches::folded(const Tensor& tokens) const {
  Shape shape{tokens.size(0), tokens.size(2) / patch.numel()};
  for (int64_t size : grid) shape.push_back(size);
  Tensor x = Tensor::empty(shape, tokens.dtype(), tokens.device());
  if (overlap) {
    add_patches_kernel(x.device(), x, tokens, patch, stride);
    return x;
  }
  if (!cover) x.fill_(0);
  Tensor into = windows(x);
  into.copy_(tokens.reshape(into.shape()));
  return x;
}

}  // namespace

Variable unfold(const Variable& x, const std::vector<int64_t>& patch, const std::vector<int64_t>& stride) {
  const ProfileScope scope("unfold", ScopeKind::forward);
  check_floating("unfold", x);
  check(x.dim() >= 3, Error::Kind::Shape, "[unfold] expected x [B, C, grid...], got ", x.shape());
  const Patches patches("unfold", x.shape().slice(2, x.dim()), patch, stride);
  return record(
      "unfold", {x}, patches.unfolded(x.value()),
      [patches](const OutputGrads& grads) -> std::vector<Tensor> { return {patches.folded(grads[0])}; });
}

Variable fold(const Variable& tokens, const std::vector<int64_t>& grid, const std::vector<int64_t>& patch,
              const std::vector<int64_t>& stride) {
  const ProfileScope scope("fold", ScopeKind::forward);
  check_floating("fold", tokens);
  const Patches patches("fold", Shape(grid), patch, stride);
  const int64_t width = patches.patch.numel(), count = patches.count.numel();
  check(tokens.dim() == 3 && tokens.size(1) == count && tokens.size(2) % width == 0, Error::Kind::Shape,
        "[fold] tokens must be [B, ", count, ", C * ", width, "] for grid ", patches.grid, " in patches ",
        patches.patch, ", got ", tokens.shape());
  return record(
      "fold", {tokens}, patches.folded(tokens.value()),
      [patches](const OutputGrads& grads) -> std::vector<Tensor> { return {patches.unfolded(grads[0])}; });
}

}  // namespace torus
