// Lists of varying length, read where they lie in the file: the library trusts what a damaged file says of their
// sizes, and writes past its memory. Not installed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "torus/core/hdf5_handles.h"

namespace torus::h5 {

/// The lists that the elements of one dataset refer to.
class Lists {
 public:
  /// A reference to a list has 16 bytes in a file, as a list of numbers has in memory.
  static constexpr size_t reference_bytes = 16;

  /// Of elements that have this many bytes in the file. Nothing where they are not stored as plain bytes, because
  /// they are filtered or lie in the header, or have another size.
  static std::optional<Lists> of(Hdf5Dataset::State& dataset, size_t element_bytes);

  /// The bytes of the list of element `index` of the dataset whose reference begins `offset` bytes into the element,
  /// and whose items have `item_bytes` each. Valid until the next call. Throws where it does not lie in the file.
  std::string_view find(int64_t index, size_t offset, size_t item_bytes);

 private:
  struct Heap;  // a collection of objects
  Lists(Hdf5Dataset::State& dataset, size_t element_bytes) : dataset_(&dataset), element_bytes_(element_bytes) {}
  void read_at(uint64_t address, void* into, size_t bytes);
  const std::vector<char>& chunk_of(int64_t index);
  const Heap& heap_at(uint64_t address);
  [[noreturn]] void fail_damaged() const;

  Hdf5Dataset::State* dataset_;
  size_t element_bytes_, length_bytes_ = 0;
  std::shared_ptr<const int> file_;  // a descriptor
  uint64_t file_bytes_ = 0, base_ = 0, elements_at_ = 0;
  int64_t chunk_ = 0, chunk_first_ = -1;            // elements a chunk; none: contiguous
  std::vector<char> elements_;                      // of the chunk that begins at chunk_first_, or one element
  std::vector<std::shared_ptr<const Heap>> heaps_;  // read last
};

}  // namespace torus::h5
