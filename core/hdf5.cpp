#include "torus/core/hdf5.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>
#include <utility>

#include "torus/core/hdf5_handles.h"
#include "torus/core/hdf5_lists.h"

namespace torus {

namespace h5 {

namespace {

std::mutex& mutex() {
  static auto* instance = new std::mutex;  // files in static variables may outlive any static of ours
  return *instance;
}

std::set<Hdf5File::State*>& open_files() {
  static auto* instance = new std::set<Hdf5File::State*>;
  return *instance;
}

bool forked = false;

}  // namespace

Library::Library() : lock_(mutex()) {
  [[maybe_unused]] static const bool once = [] {
    // At exit the library would try again, loudly and in vain, to write what a full disk refused.
    H5dont_atexit();
    register_filters();
    register_references();
    // No thread is inside the library while the process forks, so the child finds it whole and free. That of
    // the memory comes first, as it is taken last: a reader makes tensors.
    memory_stats(cpu);
    pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); },
                   [] {
                     forked = true;
                     mutex().unlock();
                   });
    return true;
  }();
  H5Eget_auto2(H5E_DEFAULT, &print_, &data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  if (!std::exchange(forked, false)) return;
  for (auto* state : open_files()) state->drop();
}

std::string reason() {
  std::string text;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned, const H5E_error2_t* error, void* into) -> herr_t {
        if (error->desc) *static_cast<std::string*>(into) = error->desc;
        return 1;  // only the innermost call
      },
      &text);
  // Of a failed system call, only what the system said.
  static const std::string quote = "error message = '";
  if (const size_t at = text.find(quote); at != std::string::npos) {
    text.erase(0, at + quote.size());
    text.erase(std::min(text.find('\''), text.size()));
  }
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace h5

using namespace h5;

std::string printable(std::string text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = [&](size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0; };
    if (byte(i) < 32 || byte(i) == 127) text[i] = ' ';
    // UTF-8 has another 32 of them, U+0080 to U+009F.
    if (byte(i) == 0xc2 && byte(i + 1) >= 0x80 && byte(i + 1) < 0xa0) text[i] = text[i + 1] = ' ';
  }
  return text;
}

namespace {

// Small data lies in the object's header, other data in chunks: either way it has a checksum.
void set_layout(hid_t plist, const Shape& shape, size_t element) {
  constexpr int64_t header_bytes = 4096, chunk_bytes = 1 << 20;
  const auto bytes = [element](const Shape& s) { return s.numel() * static_cast<int64_t>(element); };
  if (bytes(shape) <= header_bytes) {
    H5Pset_layout(plist, H5D_COMPACT);
    return;
  }
  Shape chunk = shape;
  for (int axis = 0; axis < chunk.dim() && bytes(chunk) > chunk_bytes; ++axis) {
    const int64_t rest = bytes(chunk) / chunk[axis];
    chunk[axis] = std::max<int64_t>(1, chunk_bytes / rest);
  }
  hsize_t sizes[Shape::max_axes];
  std::copy(chunk.begin(), chunk.end(), sizes);
  H5Pset_chunk(plist, chunk.dim(), sizes);
  H5Pset_fletcher32(plist);
}

// Waits until the disk holds a file or a folder.
void sync(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  int error = file < 0 ? errno : 0;
  if (file >= 0 && ::fsync(file) != 0) error = errno;
  if (file >= 0) ::close(file);
  // Devices, and folders on some network file systems, have nothing to wait for.
  if (error != 0 && error != EINVAL) fail(Error::Kind::File, "[write] ", path, ": ", std::strerror(error));
}

}  // namespace

Hdf5File::State::~State() {
  const Library library;
  open_files().erase(this);
  if (file >= 0) H5Fclose(file);
}

hid_t Hdf5File::State::root() {
  if (closed) fail_at(path, "the file is closed");
  if (file < 0 && writable) fail_at(path, "a file that is written to cannot be used after fork");
  if (file < 0) open();
  return file;
}

void Hdf5File::State::drop() {
  for (auto* dataset : datasets) dataset->handle.reset();
  // A child of fork must not write what its parent has yet to write: it forgets the handle.
  if (file >= 0 && !writable) H5Fclose(file);
  file = -1;
}

namespace {

constexpr std::string_view signature = "\x89HDF\r\n\x1a\n";

// What a file is, by its first bytes, if it is no HDF5 file; empty if it may be one. The signature of HDF5
// stands at 0 or at 512, 1024, 2048, ...
std::string find_foreign(const std::string& path, int64_t size) {
  if (size == 0) return "it is empty";
  std::ifstream file(path, std::ios::binary);
  std::string head(352, '\0');
  for (int64_t at = 0; at + 8 <= size; at = at == 0 ? 512 : 2 * at) {
    std::string start(8, '\0');
    file.seekg(at);
    file.read(start.data(), 8);
    if (start == signature) return {};
  }
  file.clear();
  file.seekg(0);
  file.read(head.data(), static_cast<std::streamsize>(head.size()));
  const auto starts = [&](std::string_view magic) { return head.compare(0, magic.size(), magic) == 0; };
  if (starts("CDF\x01") || starts("CDF\x02") || starts("CDF\x05"))
    return "it is a NetCDF-3 file; if it is MINC1, run: mincconvert -2 OLD.mnc NEW.mnc";
  if (starts("\x1f\x8b")) return "it is a gzip file";
  if (starts("PK\x03\x04")) return "it is a zip file";
  if (starts("\x93NUMPY")) return "it is a NumPy file";
  if (head.compare(344, 3, "n+1") == 0)
    return "it is a NIfTI file; run: nii2mnc FILE.nii OLD.mnc && mincconvert -2 "
           "OLD.mnc NEW.mnc";
  if (head.compare(128, 4, "DICM") == 0) return "it is a DICOM file";
  return "no signature of HDF5 in its " + std::to_string(size) +
         " bytes; a download that was cut short, or no such file?";
}

// The version of the superblock, or -1.
int superblock_version(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  char head[9] = {};
  file.read(head, sizeof head);
  return file && std::string_view(head, 8) == signature ? head[8] : -1;
}

}  // namespace

void Hdf5File::State::open() {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0 || ::access(path.c_str(), R_OK) != 0)
    fail_at(path, std::strerror(errno));
  if (S_ISDIR(status.st_mode)) fail_at(path, "is a folder");
  if (!S_ISREG(status.st_mode)) fail_at(path, "is not a regular file");
  if (const std::string foreign = find_foreign(path, status.st_size); !foreign.empty())
    fail_at(path, "not an HDF5 file, or damaged: ", foreign);
  const Id access = plist(H5P_FILE_ACCESS);
  H5Pset_file_locking(access, true, true);
  open_files().insert(this);
  file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, access);
  if (file >= 0) return;
  std::string why = reason();
  if (why.find("lock") != std::string::npos || why.find("Resource temporarily") != std::string::npos) {
    // Another program writes to it; or the file system has no locks, and a reader can do without.
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const bool busy = descriptor >= 0 && ::flock(descriptor, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (descriptor >= 0) ::close(descriptor);
    if (busy)
      fail_at(path,
              "another program has the file locked to write to it; wait for it, or, if it only reads, set "
              "HDF5_USE_FILE_LOCKING=FALSE before this one starts");
    H5Pset_file_locking(access, false, true);
    file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, access);
    if (file >= 0) return;
    why = reason() +
          "; if its file system has no locks, set HDF5_USE_FILE_LOCKING=FALSE before this program starts";
  }
  if (const int version = superblock_version(path); version > 3)
    why += "; its superblock has version " + std::to_string(version) + ", newer than this library of HDF5";
  if (why.find("truncated") != std::string::npos)
    why += ", of " + std::to_string(status.st_size) + " bytes here";
  fail_at(path, "not an HDF5 file, or damaged: ", why);
}

std::optional<std::string> Hdf5File::State::resolve(const std::string& name) {
  constexpr int most_links = 32;
  std::vector<std::string> parts;  // still to go, the next one last
  const auto push = [&parts](const std::string& text) {
    std::vector<std::string> found;
    std::istringstream in(text);
    for (std::string part; std::getline(in, part, '/');)
      if (!part.empty() && part != ".") found.push_back(part);
    parts.insert(parts.end(), found.rbegin(), found.rend());
  };
  push(name);
  std::string at;
  for (int links = 0; !parts.empty();) {
    const std::string next = at + "/" + parts.back();
    parts.pop_back();
    const htri_t found = H5Lexists(root(), next.c_str(), H5P_DEFAULT);
    if (found < 0) {
      const std::string why = reason();
      const Id parent{H5Oopen(root(), at.empty() ? "/" : at.c_str(), H5P_DEFAULT), H5Oclose};
      if (H5Iget_type(parent) == H5I_DATASET) return std::nullopt;
      fail_at(path, "cannot look for '", name, "': ", why);
    }
    if (found == 0) return std::nullopt;
    H5L_info_t link;
    if (H5Lget_info(root(), next.c_str(), &link, H5P_DEFAULT) < 0)
      fail_at(path, "cannot look for '", name, "': ", reason());
    if (link.type == H5L_TYPE_HARD) {
      at = next;
    } else if (link.type == H5L_TYPE_SOFT) {
      if (++links > most_links)
        fail_at(path, "'", name, "' goes through more than ", most_links, " links: a cycle?");
      constexpr size_t most_bytes = 1 << 16;
      if (link.u.val_size == 0 || link.u.val_size > most_bytes)
        fail_at(path, "'", next, "' is a damaged link");
      std::string target(link.u.val_size, '\0');
      if (H5Lget_val(root(), next.c_str(), target.data(), target.size(), H5P_DEFAULT) < 0)
        fail_at(path, "cannot look for '", name, "': ", reason());
      target.erase(std::min(target.find('\0'), target.size()));
      if (target.starts_with('/')) at.clear();
      push(target);
    } else {
      if (!trust.other_files)
        fail_at(path, "'", next, "' is a link to another file; only a file that is trusted may name others");
      at = next;
    }
  }
  return at.empty() ? "/" : at;
}

Id Hdf5File::State::open_object(const std::string& name) {
  const auto where = resolve(name);
  if (!where) fail_at(path, "has no '", name, "'");
  Id object{H5Oopen(root(), where->c_str(), H5P_DEFAULT), H5Oclose};
  if (object < 0) fail_at(path, "cannot open '", name, "': ", reason());
  return object;
}

Id Hdf5File::State::open_as(const std::string& name, H5I_type_t kind, const char* what) {
  Id object = open_object(name);
  if (H5Iget_type(object) != kind) fail_at(path, "'", name, "' is not a ", what);
  return object;
}

// Groups and datasets keep no times, so that equal contents make equal files.
void Hdf5File::State::create_group(const std::string& name) {
  const Id options = plist(H5P_GROUP_CREATE);
  H5Pset_obj_track_times(options, false);
  for (size_t end = 0; end != std::string::npos;) {
    end = name.find('/', end + 1);
    const std::string part = name.substr(0, end);
    if (resolve(part)) continue;
    const Id group{H5Gcreate2(root(), part.c_str(), H5P_DEFAULT, options, H5P_DEFAULT), H5Gclose};
    if (group < 0) fail_at(path, "cannot make the group '", part, "': ", reason());
  }
}

Id Hdf5File::State::create_dataset(const std::string& name, const Shape& shape, DType dtype) {
  if (resolve(name)) fail_at(path, "'", name, "' is there already");
  if (const size_t slash = name.find_last_of('/'); slash != std::string::npos && slash > 0)
    create_group(name.substr(0, slash));
  const Id type = type_of(dtype), space = space_of(shape), options = plist(H5P_DATASET_CREATE);
  H5Pset_obj_track_times(options, false);
  set_layout(options, shape, size_of(dtype));
  Id dataset{H5Dcreate2(root(), name.c_str(), type, space, H5P_DEFAULT, options, H5P_DEFAULT), H5Dclose};
  if (dataset < 0) fail_at(path, "cannot write '", name, "': ", reason());
  return dataset;
}

Shape Hdf5File::State::shape_of(hid_t space, const std::string& name) const {
  const int axes = H5Sget_simple_extent_ndims(space);
  if (axes < 0 || H5Sget_simple_extent_type(space) == H5S_NULL) fail_at(path, "'", name, "' has no shape");
  if (axes > Shape::max_axes)
    fail_at(path, "'", name, "' has ", axes, " axes; a tensor has at most ", Shape::max_axes);
  hsize_t sizes[Shape::max_axes] = {};
  H5Sget_simple_extent_dims(space, sizes, nullptr);
  Shape shape;
  int64_t rest = std::numeric_limits<int64_t>::max();
  for (int axis = 0; axis < axes; ++axis) {
    if (sizes[axis] > static_cast<hsize_t>(rest))
      fail_at(path, "'", name, "' claims more than 2^63 - 1 elements");
    if (sizes[axis] > 0) rest /= static_cast<int64_t>(sizes[axis]);
    shape.push_back(static_cast<int64_t>(sizes[axis]));
  }
  return shape;
}

Hdf5File::Hdf5File(std::shared_ptr<State> state) : state_(std::move(state)) {}
Hdf5File::Hdf5File(Hdf5File&&) noexcept = default;
Hdf5File& Hdf5File::operator=(Hdf5File&&) noexcept = default;
Hdf5File::~Hdf5File() = default;

const std::string& Hdf5File::path() const { return state_->path; }

Hdf5File Hdf5File::open(const std::string& path, const Hdf5Trust& trust) {
  auto state = std::make_shared<State>();
  state->path = path;
  state->trust = trust;
  const Library library;
  state->open();
  return Hdf5File(std::move(state));
}

Hdf5File Hdf5File::create(const std::string& path) {
  auto state = std::make_shared<State>();
  state->path = path;
  state->writable = true;
  const Library library;
  const Id creation = plist(H5P_FILE_CREATE), access = plist(H5P_FILE_ACCESS);
  H5Pset_obj_track_times(creation, false);
  // The first format with checksums everywhere.
  H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
  state->file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation, access);
  if (state->file < 0) fail_at(path, "cannot make the file: ", reason());
  open_files().insert(state.get());
  return Hdf5File(std::move(state));
}

void Hdf5File::close() {
  std::string error;
  {
    const Library library;
    const hid_t file = state_->root();
    if (state_->writable && H5Fflush(file, H5F_SCOPE_GLOBAL) < 0) error = reason();
    for (auto* dataset : state_->datasets) dataset->handle.reset();
    state_->file = -1;
    state_->closed = true;
    if (H5Fclose(file) < 0 && error.empty()) error = reason();
  }
  if (!error.empty()) fail_at(path(), "cannot write: ", error);
  if (state_->writable) sync(path());
}

void Hdf5File::release() const {
  const Library library;
  if (!state_->writable) state_->drop();
}

std::vector<Hdf5File::Entry> Hdf5File::list(const std::string& group) const {
  constexpr size_t most = 1000000;
  const Library library;
  const Id parent = state_->open_as(group, H5I_GROUP, "group");
  // In the order of the file: for any other the library builds a table, and crashes where damage stops it.
  std::vector<std::string> names;
  const auto note = [](hid_t, const char* name, const H5L_info_t*, void* into) -> herr_t {
    auto& noted = *static_cast<std::vector<std::string>*>(into);
    noted.emplace_back(name);
    return noted.size() >= most ? 1 : 0;
  };
  if (H5Literate(parent, H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, note, &names) < 0)
    fail_at(path(), "cannot list '", group, "': ", reason());
  std::sort(names.begin(), names.end());
  std::vector<Entry> entries;
  for (const std::string& name : names) {
    H5L_info_t link;
    if (H5Lget_info(parent, name.c_str(), &link, H5P_DEFAULT) < 0)
      fail_at(path(), "cannot open '", name, "' in '", group, "': ", reason());
    Id object;
    if (link.type == H5L_TYPE_HARD) {
      object = Id{H5Oopen(parent, name.c_str(), H5P_DEFAULT), H5Oclose};
      if (object < 0) fail_at(path(), "cannot open '", name, "' in '", group, "': ", reason());
    } else {
      try {
        object = state_->open_object(group + "/" + name);
      } catch (const Error&) {  // it leads nowhere, or where we do not go
        continue;
      }
    }
    const H5I_type_t kind = H5Iget_type(object);
    if (kind == H5I_GROUP || kind == H5I_DATASET)
      entries.push_back({name, kind == H5I_GROUP, link.type != H5L_TYPE_HARD});
  }
  return entries;
}

std::vector<Hdf5File::Entry> Hdf5File::walk() const {
  constexpr size_t most = 1000000;
  constexpr int deepest = 64;
  const auto address = [this](const std::string& name) {
    const Library library;
    hobj_ref_t result = 0;
    const auto where = state_->resolve(name);
    if (where) H5Rcreate(&result, state_->root(), where->c_str(), H5R_OBJECT, -1);
    return result;
  };
  std::vector<Entry> found;
  std::set<hobj_ref_t> seen = {address("/")};
  struct Group {
    std::string path;
    int depth;
  };
  std::vector<Group> to_do = {{"", 0}};
  while (!to_do.empty()) {
    const Group group = to_do.back();
    to_do.pop_back();
    for (const Entry& entry : list(group.path.empty() ? "/" : group.path)) {
      const std::string name = group.path + "/" + entry.name;
      if (entry.is_link || !seen.insert(address(name)).second) continue;
      if (found.size() >= most || group.depth >= deepest)
        fail_at(path(), "holds more than ", most, " objects, or groups nested more than ", deepest, " deep");
      found.push_back({name, entry.is_group});
      if (entry.is_group) to_do.push_back({name, group.depth + 1});
    }
  }
  std::sort(found.begin(), found.end(), [](const Entry& a, const Entry& b) { return a.name < b.name; });
  return found;
}

bool Hdf5File::contains(const std::string& name) const {
  const Library library;
  const auto where = state_->resolve(name);
  return where.has_value();
}

void Hdf5File::create_group(const std::string& name) {
  const Library library;
  state_->create_group(name);
}

void Hdf5File::create_dataset(const std::string& name, const Shape& shape, DType dtype) {
  const Library library;
  state_->create_dataset(name, shape, dtype);
}

void Hdf5File::write(const std::string& name, const Tensor& tensor) {
  check(tensor.defined(), Error::Kind::Value, "[hdf5] the tensor '", name, "' is undefined");
  const Tensor values = tensor.to(cpu).contiguous();
  const Library library;
  const Id dataset = state_->create_dataset(name, values.shape(), values.dtype());
  const Id type = type_of(values.dtype());
  const void* data =
      dispatch(values.dtype(), [&](auto zero) -> const void* { return values.data<decltype(zero)>(); });
  if (values.numel() > 0 && H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) < 0)
    fail_at(path(), "cannot write '", name, "': ", reason());
}

void Hdf5File::write_box(const std::string& name, const Shape& first, const Tensor& tensor) {
  const Tensor values = tensor.to(cpu).contiguous();
  const auto found = open_dataset(name);
  const Library library;
  const Id dataset = state_->open_as(name, H5I_DATASET, "dataset");
  const Shape& count = values.shape();
  const Shape& shape = found.info().shape;
  bool inside =
      first.dim() == shape.dim() && count.dim() == shape.dim() && values.dtype() == found.info().dtype;
  for (int axis = 0; inside && axis < shape.dim(); ++axis)
    inside = first[axis] >= 0 && first[axis] <= shape[axis] && count[axis] <= shape[axis] - first[axis];
  if (!inside)
    fail_at(path(), "'", name, "' is ", found.info().dtype, " ", shape, "; no ", values.dtype(), " ", count,
            " begins at ", first, " in it");
  if (values.numel() == 0) return;
  const Id file_space{H5Dget_space(dataset), H5Sclose}, memory_space = space_of(count),
                                                        type = type_of(values.dtype());
  hsize_t start[Shape::max_axes], sizes[Shape::max_axes];
  std::copy(first.begin(), first.end(), start);
  std::copy(count.begin(), count.end(), sizes);
  if (count.dim() > 0) H5Sselect_hyperslab(file_space, H5S_SELECT_SET, start, nullptr, sizes, nullptr);
  const void* data =
      dispatch(values.dtype(), [&](auto zero) -> const void* { return values.data<decltype(zero)>(); });
  if (H5Dwrite(dataset, type, memory_space, file_space, H5P_DEFAULT, data) < 0)
    fail_at(path(), "cannot write '", name, "': ", reason());
}

void write_atomically(const std::string& path,
                      const std::function<void(const std::string& temporary)>& writer) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  fs::path target = path;
  if (fs::is_symlink(target, ignored) && fs::exists(target, ignored)) target = fs::canonical(target, ignored);
  if (fs::exists(target, ignored) && !fs::is_regular_file(target, ignored))
    fail(Error::Kind::File, "[write] ", path, ": is not a regular file");
  const fs::path folder = target.has_parent_path() ? target.parent_path() : ".";
  if (!fs::is_directory(folder, ignored))
    fail(Error::Kind::File, "[write] ", path, ": there is no folder ", folder.string());

  static std::atomic<int> calls{0};
  const std::string temporary =
      target.string() + ".tmp" + std::to_string(::getpid()) + "-" + std::to_string(calls++);
  try {
    writer(temporary);
    sync(temporary);
    if (::rename(temporary.c_str(), target.c_str()) != 0)
      fail(Error::Kind::File, "[write] ", path, ": ", std::strerror(errno));
  } catch (...) {
    // Emptied first: a file that could not be closed keeps its blocks for as long as the process lives.
    [[maybe_unused]] const int emptied = ::truncate(temporary.c_str(), 0);
    ::unlink(temporary.c_str());
    throw;
  }
  sync(folder);
}

}  // namespace torus
