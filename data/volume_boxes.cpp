#include "torus/data/volume_boxes.h"

#include <algorithm>
#include <list>
#include <mutex>

#include "torus/data/permutation.h"

namespace torus {

struct VolumeBoxes::Open {
  std::mutex mutex;
  std::list<size_t> order;  // of the volumes that may be open, the one used last in front
};

VolumeBoxes::VolumeBoxes(std::vector<Volume> volumes, const VolumeBoxOptions& options)
    : volumes_(std::move(volumes)), options_(options), open_(std::make_shared<Open>()) {
  check(!volumes_.empty() && options_.batch >= 1 && options_.most_open >= 1, Error::Kind::Value,
        "[volume boxes] expected volumes, batch >= 1 and most_open >= 1, got ", volumes_.size(), ", ",
        options_.batch, " and ", options_.most_open);
  for (const Volume& volume : volumes_) {
    const Shape& shape = volume.shape();
    bool fits =
        shape.dim() == options_.box.dim() && volume.info().is_complex == volumes_[0].info().is_complex;
    int64_t count = 1;
    for (int axis = 0; fits && axis < shape.dim(); ++axis) {
      if (options_.box[axis] == 0) options_.box[axis] = shape[axis];
      fits = options_.box[axis] >= 1 && options_.box[axis] <= shape[axis] &&
             (options.box[axis] != 0 || options_.box[axis] == shape[axis]);
      count *= fits ? shape[axis] / options_.box[axis] : 0;
    }
    check(fits, Error::Kind::Shape, "[volume boxes] ", volume.path(), ": a box of ", options_.box,
          " must fit into its shape, got ", shape, volume.info().is_complex ? " of complex numbers" : "");
    first_box_.push_back(boxes_);
    boxes_ += count;
  }
}

Batch VolumeBoxes::batch(int64_t index) const {
  check(index >= 0, Error::Kind::Value, "[volume boxes] expected a batch from 0, got ", index);
  struct Part {
    size_t volume;
    Shape first;
    int64_t row;
  };
  const Shape& box = options_.box;
  std::vector<Part> parts;
  for (int64_t row = 0; row < options_.batch; ++row) {
    const int64_t number = index * options_.batch + row, epoch = number / boxes_;
    const int64_t chosen = Permutation(boxes_, options_.seed, static_cast<uint64_t>(epoch))(number % boxes_);
    const size_t v = static_cast<size_t>(std::upper_bound(first_box_.begin(), first_box_.end(), chosen) -
                                         first_box_.begin() - 1);
    const Shape& shape = volumes_[v].shape();
    Part part{v, shape, row};
    int64_t rest = chosen - first_box_[v];
    for (int axis = shape.dim() - 1; axis >= 0; --axis) {
      const int64_t count = shape[axis] / box[axis], slack = shape[axis] % box[axis];
      // Where the grid of this epoch begins.
      const uint64_t stream =
          (static_cast<uint64_t>(epoch) << 32) + (static_cast<uint64_t>(v) << 4) + uint64_t(axis);
      const int64_t start = slack == 0 ? 0 : Permutation(slack + 1, ~options_.seed, stream)(0);
      part.first[axis] = start + rest % count * box[axis];
      rest /= count;
    }
    parts.push_back(part);
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return a.volume != b.volume
               ? a.volume < b.volume
               : std::lexicographical_compare(a.first.begin(), a.first.end(), b.first.begin(), b.first.end());
  });

  Shape result_shape = box;
  result_shape.insert(0, options_.batch);
  if (volumes_[0].info().is_complex) result_shape.push_back(2);
  Tensor result = Tensor::empty(result_shape, options_.dtype);
  for (const Part& part : parts) {
    Tensor into = result.select(0, part.row);
    volumes_[part.volume].read_into(into, part.first, box);
    const std::lock_guard lock(open_->mutex);
    open_->order.remove(part.volume);
    open_->order.push_front(part.volume);
    if (static_cast<int64_t>(open_->order.size()) > options_.most_open) {
      volumes_[open_->order.back()].release();
      open_->order.pop_back();
    }
  }
  return {std::move(result), {}};
}

}  // namespace torus
