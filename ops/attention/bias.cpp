#include "torus/ops/attention/bias.h"

#include <bit>
#include <cmath>

namespace torus {

AttentionBias::AttentionBias(Variable tensor) : AttentionBias(Kind::dense, std::move(tensor)) {
  check(value_.defined() && value_.dim() <= 4, Error::Kind::Shape,
        "[attention] a bias must broadcast to [B, H, Nq, Nk], got ", value_.defined() ? value_.dim() : 0,
        " axes");
}

AttentionBias relative_bias(Variable table, std::vector<int64_t> grid, std::vector<bool> wrapped) {
  if (wrapped.empty()) wrapped.assign(grid.size(), false);
  check(table.dim() == static_cast<int>(grid.size()) + 1 && wrapped.size() == grid.size(), Error::Kind::Shape,
        "[relative_bias] expected a table of one axis for heads and ", grid.size(),
        " for the grid, and as many wrapped, got ", table.shape(), " and ", wrapped.size());
  for (int a = 1; a < table.dim(); ++a)
    check(table.size(a) % 2 == 1, Error::Kind::Shape, "[relative_bias] axis ", a - 1,
          " of the table must have an odd size, got ", table.size(a));
  AttentionBias bias(AttentionBias::Kind::relative, std::move(table));
  bias.grid_ = std::move(grid);
  bias.wrapped_ = std::move(wrapped);
  return bias;
}

AttentionBias alibi(Tensor slopes) {
  check(slopes.dim() == 1 && is_floating(slopes.dtype()), Error::Kind::Shape,
        "[alibi] expected slopes [H], floating, got ", slopes.dtype(), " ", slopes.shape());
  return AttentionBias(AttentionBias::Kind::alibi, Variable(std::move(slopes)));
}

Tensor alibi_slopes(int64_t heads, DType dtype) {
  check(heads > 0, Error::Kind::Value, "[alibi] expected at least one head, got ", heads);
  const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(heads)));
  std::vector<double> slopes;
  for (int64_t i = 1; i <= power; ++i)
    slopes.push_back(std::exp2(-8.0 * static_cast<double>(i) / static_cast<double>(power)));
  for (int64_t i = 1; static_cast<int64_t>(slopes.size()) < heads; i += 2)
    slopes.push_back(std::exp2(-4.0 * static_cast<double>(i) / static_cast<double>(power)));
  return Tensor::from(slopes, {heads}).to(dtype);
}

}  // namespace torus
