// Lists of varying length, text among them, read where they lie in the file: the library trusts what a
// damaged file says of their sizes, hangs, and writes past its memory. Not installed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "torus/core/hdf5_handles.h"

namespace torus::h5 {

/// Lets the library read references to lists as bytes, which it does not follow.
void register_references();

/// The lists that the elements of a dataset or an attribute refer to.
class Lists {
 public:
  /// `name` of the object, for errors.
  Lists(hid_t object, std::string path, std::string name);

  /// A reference in memory, as the library reads it for text of variable length and lists, and its bytes.
  Id reference_type() const;
  size_t reference_bytes() const { return 8 + address_bytes_; }
  static constexpr size_t usual_reference_bytes = 16;  // where addresses have 64 bits

  /// How many items the list that a reference leads to has.
  static int64_t length(const char* reference);
  /// The bytes of the list that a reference leads to, whose items have `item_bytes` each. Valid until the
  /// next call. Throws where it does not lie in the file.
  std::string_view find(const char* reference, size_t item_bytes);

 private:
  struct Heap;  // a collection of objects
  void read_at(uint64_t address, void* into, size_t bytes);
  const Heap& heap_at(uint64_t address);
  [[noreturn]] void fail_damaged() const;

  std::string path_, name_;
  size_t address_bytes_ = 0, length_bytes_ = 0;
  std::shared_ptr<const int> file_;  // a descriptor
  uint64_t file_bytes_ = 0, base_ = 0;
  std::vector<std::shared_ptr<const Heap>> heaps_;  // read last
};

}  // namespace torus::h5
