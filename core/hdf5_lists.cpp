#include "torus/core/hdf5_lists.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace torus::h5 {

namespace {

// A little-endian number of up to 8 bytes.
uint64_t number(const char* bytes, size_t count) {
  uint64_t value = 0;
  for (size_t i = count; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

constexpr char reference_tag[] = "a reference to a list, not followed";

// A conversion of the library from text of variable length and lists to the bytes of their references, which
// are what it has read.
herr_t keep_reference(hid_t from, hid_t to, H5T_cdata_t* data, size_t, size_t, size_t, void*, void*, hid_t) {
  if (data->command != H5T_CONV_INIT) return 0;
  data->need_bkg = H5T_BKG_NO;
  char* tag = H5Tget_tag(to);
  const bool is_ours = tag && std::strcmp(tag, reference_tag) == 0 &&
                       (H5Tget_class(from) == H5T_VLEN || H5Tis_variable_str(from) > 0);
  if (tag) H5free_memory(tag);
  return is_ours ? 0 : -1;
}

}  // namespace

void register_references() {
  const Id list{H5Tvlen_create(H5T_NATIVE_FLOAT), H5Tclose}, text{H5Tcopy(H5T_C_S1), H5Tclose},
      bytes{H5Tcreate(H5T_OPAQUE, 1), H5Tclose};
  for (const hid_t from : {hid_t{list}, hid_t{text}})  // only their classes count
    H5Tregister(H5T_PERS_SOFT, "reference to a list", from, bytes, keep_reference);
}

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

Lists::Lists(hid_t object, std::string path, std::string name)
    : path_(std::move(path)), name_(std::move(name)) {
  // The file that holds the object: of a file that is trusted, perhaps another one.
  const Id holder{H5Iget_file_id(object), H5Fclose}, creation{H5Fget_create_plist(holder), H5Pclose};
  hsize_t base = 0;
  H5Pget_sizes(creation, &address_bytes_, &length_bytes_);
  H5Pget_userblock(creation, &base);
  base_ = base;
  if (address_bytes_ == 0 || address_bytes_ > 8 || length_bytes_ == 0 || length_bytes_ > 8) fail_damaged();
  std::string holder_path(static_cast<size_t>(std::max<ssize_t>(0, H5Fget_name(object, nullptr, 0))), '\0');
  H5Fget_name(object, holder_path.data(), holder_path.size() + 1);
  const int file = ::open(holder_path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail_at(path_, std::strerror(errno));
  file_ = std::shared_ptr<const int>(new int(file), [](const int* held) {
    ::close(*held);
    delete held;
  });
  struct stat status;
  if (::fstat(file, &status) == 0) file_bytes_ = static_cast<uint64_t>(status.st_size);
}

Id Lists::reference_type() const {
  Id type{H5Tcreate(H5T_OPAQUE, reference_bytes()), H5Tclose};
  H5Tset_tag(type, reference_tag);
  return type;
}

void Lists::fail_damaged() const {
  fail_at(path_, "'", name_, "' is damaged: a list of its elements does not lie in the file");
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

const Lists::Heap& Lists::heap_at(uint64_t address) {
  constexpr size_t most_heaps = 8, most_bytes = size_t{64} << 20;
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
  size_t kept = heap->bytes.size();
  for (const auto& other : heaps_) kept += other->bytes.size();
  while (!heaps_.empty() && (heaps_.size() >= most_heaps || kept > most_bytes)) {
    kept -= heaps_[0]->bytes.size();
    heaps_.erase(heaps_.begin());
  }
  return *heaps_.emplace_back(std::move(heap));
}

// A reference: how many items, the address of the heap, and the number of the object in it.
int64_t Lists::length(const char* reference) { return static_cast<int64_t>(number(reference, 4)); }

std::string_view Lists::find(const char* reference, size_t item_bytes) {
  const uint64_t items = number(reference, 4);
  if (items == 0) return {};
  const Heap& heap = heap_at(number(reference + 4, address_bytes_));
  const uint64_t wanted = number(reference + 4 + address_bytes_, 4);
  const auto found =
      std::lower_bound(heap.objects.begin(), heap.objects.end(), wanted,
                       [](const Heap::Object& object, uint64_t i) { return object.index < i; });
  if (found == heap.objects.end() || found->index != wanted ||
      found->bytes / std::max<size_t>(1, item_bytes) < items)
    fail_damaged();
  return {heap.bytes.data() + found->offset, static_cast<size_t>(items) * item_bytes};
}

}  // namespace torus::h5
