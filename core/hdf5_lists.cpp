#include "torus/core/hdf5_lists.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace torus::h5 {

namespace {

// A little-endian number of up to 8 bytes.
uint64_t number(const char* bytes, size_t count) {
  uint64_t value = 0;
  for (size_t i = count; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

}  // namespace

// A global heap collection (format specification III.E): a head, then objects of any size, padded to 8 bytes.
struct Lists::Heap {
  struct Object {
    uint64_t index;
    size_t offset, bytes;
  };
  uint64_t address;
  std::vector<char> bytes;
  std::vector<Object> objects;  // sorted by index
};

std::optional<Lists> Lists::of(Hdf5Dataset::State& dataset, size_t element_bytes) {
  const hid_t id = dataset.id();
  const Id options{H5Dget_create_plist(id), H5Pclose};
  const H5D_layout_t layout = H5Pget_layout(options);
  const bool is_chunked = layout == H5D_CHUNKED && dataset.info.shape.dim() == 1;
  if ((!is_chunked && layout != H5D_CONTIGUOUS) || !dataset.info.filters.empty() ||
      H5Pget_external_count(options) > 0)
    return std::nullopt;
  Lists result(dataset, element_bytes);
  const Id creation{H5Fget_create_plist(dataset.file->root()), H5Pclose};
  hsize_t base = 0;
  size_t address_bytes = 0;
  H5Pget_sizes(creation, &address_bytes, &result.length_bytes_);
  H5Pget_userblock(creation, &base);
  result.base_ = base;
  if (address_bytes != 8 || result.length_bytes_ != 8) return std::nullopt;
  if (is_chunked) {
    result.chunk_ = dataset.info.chunk[0];
  } else {
    result.elements_at_ = H5Dget_offset(id);
    if (result.elements_at_ == HADDR_UNDEF ||
        dataset.info.stored_bytes != dataset.info.shape.numel() * static_cast<int64_t>(element_bytes))
      return std::nullopt;
  }
  const int file = ::open(dataset.file->path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail_at(dataset.file->path, std::strerror(errno));
  result.file_ = std::shared_ptr<const int>(new int(file), [](const int* held) {
    ::close(*held);
    delete held;
  });
  struct stat status;
  if (::fstat(file, &status) == 0) result.file_bytes_ = static_cast<uint64_t>(status.st_size);
  return result;
}

void Lists::fail_damaged() const {
  fail_at(dataset_->file->path, "'", dataset_->name,
          "' is damaged: a list of its elements does not lie in the file");
}

void Lists::read_at(uint64_t address, void* into, size_t bytes) {
  if (bytes > file_bytes_ || address > file_bytes_ - bytes) fail_damaged();
  auto* out = static_cast<char*>(into);
  for (size_t done = 0; done < bytes;) {
    const ssize_t count = ::pread(*file_, out + done, bytes - done, static_cast<off_t>(address + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail_damaged();
    done += static_cast<size_t>(count);
  }
}

const std::vector<char>& Lists::chunk_of(int64_t index) {
  const int64_t first = chunk_ > 0 ? index / chunk_ * chunk_ : index;
  if (chunk_first_ == first) return elements_;
  chunk_first_ = -1;
  elements_.assign(element_bytes_ * static_cast<size_t>(std::max<int64_t>(chunk_, 1)), 0);
  if (chunk_ == 0) {
    const uint64_t offset = static_cast<uint64_t>(index) * element_bytes_;
    if (offset > file_bytes_) fail_damaged();
    read_at(elements_at_ + offset, elements_.data(), element_bytes_);
  } else {
    const hsize_t at = static_cast<hsize_t>(first);
    hsize_t stored = 0;
    uint32_t skipped = 0;
    if (H5Dget_chunk_storage_size(dataset_->id(), &at, &stored) < 0) fail_damaged();
    if (stored != 0 && (stored != elements_.size() ||
                        H5Dread_chunk(dataset_->id(), H5P_DEFAULT, &at, &skipped, elements_.data()) < 0))
      fail_damaged();
  }
  chunk_first_ = first;
  return elements_;
}

const Lists::Heap& Lists::heap_at(uint64_t address) {
  constexpr size_t most_heaps = 8;
  const auto known =
      std::find_if(heaps_.begin(), heaps_.end(), [&](const auto& heap) { return heap->address == address; });
  if (known != heaps_.end()) return **known;
  auto heap = std::make_shared<Heap>();
  heap->address = address;
  char head[16];
  const size_t head_bytes = 8 + length_bytes_;
  if (address > file_bytes_ || base_ > file_bytes_) fail_damaged();
  read_at(base_ + address, head, head_bytes);
  const uint64_t bytes = number(head + 8, length_bytes_);
  if (std::memcmp(head, "GCOL\1", 5) != 0 || bytes < head_bytes || bytes > file_bytes_) fail_damaged();
  heap->bytes.resize(static_cast<size_t>(bytes));
  read_at(base_ + address, heap->bytes.data(), heap->bytes.size());
  const size_t object_head = 8 + length_bytes_;
  for (size_t at = head_bytes; heap->bytes.size() - at >= object_head;) {
    const char* object = heap->bytes.data() + at;
    const uint64_t index = number(object, 2), size = number(object + 8, length_bytes_);
    at += object_head;
    if (index == 0) break;  // the free space at the end
    if (size > heap->bytes.size() - at) fail_damaged();
    heap->objects.push_back({index, at, static_cast<size_t>(size)});
    at = std::min(heap->bytes.size(), at + static_cast<size_t>((size + 7) / 8 * 8));
  }
  std::sort(heap->objects.begin(), heap->objects.end(),
            [](const auto& a, const auto& b) { return a.index < b.index; });
  if (heaps_.size() == most_heaps) heaps_.erase(heaps_.begin());
  return *heaps_.emplace_back(std::move(heap));
}

std::string_view Lists::find(int64_t index, size_t offset, size_t item_bytes) {
  // A reference: how many items, the address of the heap, and the number of the object in it.
  const auto& elements = chunk_of(index);
  const size_t at = offset + element_bytes_ * static_cast<size_t>(index - chunk_first_);
  if (at + reference_bytes > elements.size()) fail_damaged();
  const uint64_t items = number(elements.data() + at, 4);
  if (items == 0) return {};
  const Heap& heap = heap_at(number(elements.data() + at + 4, 8));
  const uint64_t wanted = number(elements.data() + at + 12, 4);
  const auto found =
      std::lower_bound(heap.objects.begin(), heap.objects.end(), wanted,
                       [](const Heap::Object& object, uint64_t i) { return object.index < i; });
  if (found == heap.objects.end() || found->index != wanted || found->bytes / item_bytes < items)
    fail_damaged();
  return {heap.bytes.data() + found->offset, static_cast<size_t>(items) * item_bytes};
}

}  // namespace torus::h5
