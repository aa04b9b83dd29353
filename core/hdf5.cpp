#include "torus/core/hdf5.h"

#include <fcntl.h>
#include <hdf5.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <mutex>
#include <utility>

namespace torus {

namespace {

// The lock of the library. While it is held, HDF5 keeps its error stack to itself.
class Library {
 public:
  Library() : lock_(mutex()) {
    // At exit the library would try again, loudly and in vain, to write what a full disk refused.
    [[maybe_unused]] static const herr_t once = H5dont_atexit();
    H5Eget_auto2(H5E_DEFAULT, &print_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  ~Library() { H5Eset_auto2(H5E_DEFAULT, print_, data_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

 private:
  static std::mutex& mutex() {
    static auto* instance = new std::mutex;  // files in static variables may outlive any static of ours
    return *instance;
  }

  std::lock_guard<std::mutex> lock_;
  H5E_auto2_t print_ = nullptr;
  void* data_ = nullptr;
};

// What the library says of its last failure, in one line.
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

template <class... Parts>
[[noreturn]] void fail_at(const std::string& path, const Parts&... parts) {
  fail(Error::Kind::File, "[hdf5] ", path, ": ", parts...);
}

// A handle of the library, closed with the function that fits it.
class Id {
 public:
  Id() = default;
  Id(hid_t id, herr_t (*close)(hid_t)) : id_(id), close_(close) {}
  Id(Id&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Id& operator=(Id&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  ~Id() {
    if (id_ >= 0) close_(id_);
  }
  operator hid_t() const { return id_; }
  hid_t release() { return std::exchange(id_, -1); }

 private:
  hid_t id_ = -1;
  herr_t (*close_)(hid_t) = nullptr;
};

Id plist(hid_t kind) { return {H5Pcreate(kind), H5Pclose}; }

// A 16-bit float with these widths, little-endian.
Id float16(size_t exponent, size_t mantissa, size_t bias) {
  Id type{H5Tcopy(H5T_IEEE_F32LE), H5Tclose};
  H5Tset_fields(type, 15, mantissa, exponent, 0, mantissa);
  H5Tset_size(type, 2);
  H5Tset_ebias(type, bias);
  return type;
}

Id boolean_type() {
  Id type{H5Tenum_create(H5T_STD_I8LE), H5Tclose};
  const int8_t no = 0, yes = 1;
  H5Tenum_insert(type, "FALSE", &no);
  H5Tenum_insert(type, "TRUE", &yes);
  return type;
}

// How a dtype lies in memory; in files we write, little-endian, the same.
Id type_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return float16(5, 10, 15);
    case DType::bf16:
      return float16(8, 7, 127);
    case DType::boolean:
      return boolean_type();
    case DType::f64:
      return {H5Tcopy(H5T_NATIVE_DOUBLE), H5Tclose};
    case DType::f32:
      return {H5Tcopy(H5T_NATIVE_FLOAT), H5Tclose};
    case DType::i64:
      return {H5Tcopy(H5T_NATIVE_INT64), H5Tclose};
    case DType::i32:
      return {H5Tcopy(H5T_NATIVE_INT32), H5Tclose};
    case DType::u8:
      return {H5Tcopy(H5T_NATIVE_UINT8), H5Tclose};
  }
  fail(Error::Kind::DType, "[hdf5] unknown dtype ", static_cast<int>(dtype));
}

bool is_boolean(hid_t type) {
  if (H5Tget_class(type) != H5T_ENUM || H5Tget_size(type) != 1 || H5Tget_nmembers(type) != 2) return false;
  int8_t no = -1, yes = -1;
  return H5Tenum_valueof(type, "FALSE", &no) >= 0 && H5Tenum_valueof(type, "TRUE", &yes) >= 0 && no == 0 &&
         yes == 1;
}

bool is_unsigned_64(hid_t type) {
  return H5Tget_class(type) == H5T_INTEGER && H5Tget_size(type) == 8 && H5Tget_sign(type) == H5T_SGN_NONE;
}

// The dtype that holds every value of a type; false if there is none.
bool find_dtype(hid_t type, DType& dtype) {
  const size_t size = H5Tget_size(type);
  switch (H5Tget_class(type)) {
    case H5T_INTEGER: {
      const bool is_signed = H5Tget_sign(type) == H5T_SGN_2;
      dtype = size == 1 && !is_signed ? u8 : size <= 2 || (size <= 4 && is_signed) ? i32 : i64;
      return size <= 8;
    }
    case H5T_FLOAT: {
      size_t sign = 0, exponent_at = 0, exponent = 0, mantissa_at = 0, mantissa = 0;
      H5Tget_fields(type, &sign, &exponent_at, &exponent, &mantissa_at, &mantissa);
      const size_t bias = H5Tget_ebias(type);
      if (exponent == 5 && mantissa == 10 && bias == 15 && size == 2)
        dtype = f16;
      else if (exponent == 8 && mantissa == 7 && bias == 127 && size == 2)
        dtype = bf16;
      else
        dtype = exponent <= 8 && mantissa <= 23 && bias <= 127 ? f32 : f64;
      return exponent <= 11 && mantissa <= 52 && bias <= 1023;
    }
    case H5T_ENUM: {
      dtype = boolean;
      if (is_boolean(type)) return true;
      const Id base{H5Tget_super(type), H5Tclose};
      return find_dtype(base, dtype);
    }
    default:
      return false;
  }
}

void check_signed(const std::string& path, const std::string& name, const int64_t* values, int64_t count) {
  if (std::any_of(values, values + count, [](int64_t value) { return value < 0; }))
    fail_at(path, "'", name, "' holds unsigned integers above 2^63 - 1");
}

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

Id space_of(const Shape& shape) {
  if (shape.dim() == 0) return {H5Screate(H5S_SCALAR), H5Sclose};
  hsize_t sizes[Shape::max_axes];
  std::copy(shape.begin(), shape.end(), sizes);
  return {H5Screate_simple(shape.dim(), sizes, nullptr), H5Sclose};
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

struct Hdf5File::State {
  std::string path;
  hid_t file = -1;
  bool writable = false;

  ~State() {
    if (file < 0) return;
    const Library library;
    H5Fclose(file);
  }

  // The root; throws once the file is closed.
  hid_t root() const {
    if (file < 0) fail_at(path, "the file is closed");
    return file;
  }

  // Each part of the path is asked for in turn: H5Lexists fails if one before the last is missing.
  bool contains(const std::string& name) const {
    for (size_t end = 0; end != std::string::npos;) {
      end = name.find('/', end + 1);
      const std::string part = name.substr(0, end);
      if (part.empty() || part.find_first_not_of('/') == std::string::npos) continue;
      const htri_t found = H5Lexists(root(), part.c_str(), H5P_DEFAULT);
      if (found < 0) {
        const std::string why = reason();
        const Id parent{H5Oopen(root(), part.substr(0, part.find_last_of('/')).c_str(), H5P_DEFAULT),
                        H5Oclose};
        if (H5Iget_type(parent) == H5I_DATASET) return false;
        fail_at(path, "cannot look for '", name, "': ", why);
      }
      if (found == 0) return false;
    }
    return true;
  }

  Id open_object(const std::string& name) const {
    if (!contains(name)) fail_at(path, "has no '", name, "'");
    Id object{H5Oopen(root(), name.c_str(), H5P_DEFAULT), H5Oclose};
    if (object < 0) fail_at(path, "cannot open '", name, "': ", reason());
    return object;
  }

  Id open_as(const std::string& name, H5I_type_t kind, const char* what) const {
    Id object = open_object(name);
    if (H5Iget_type(object) != kind) fail_at(path, "'", name, "' is not a ", what);
    return object;
  }

  Shape shape_of(hid_t space, const std::string& name) const {
    const int axes = H5Sget_simple_extent_ndims(space);
    if (axes < 0 || H5Sget_simple_extent_type(space) == H5S_NULL) fail_at(path, "'", name, "' has no shape");
    if (axes > Shape::max_axes)
      fail_at(path, "'", name, "' has ", axes, " axes; a tensor has at most ", Shape::max_axes);
    hsize_t sizes[Shape::max_axes] = {};
    H5Sget_simple_extent_dims(space, sizes, nullptr);
    Shape shape;
    for (int axis = 0; axis < axes; ++axis) shape.push_back(static_cast<int64_t>(sizes[axis]));
    return shape;
  }

  DType dtype_of_type(hid_t type, const std::string& name) const {
    DType dtype = f32;
    if (!find_dtype(type, dtype)) fail_at(path, "'", name, "' has elements of a type that no dtype holds");
    return dtype;
  }

  Dataset describe(hid_t dataset, const std::string& name) const {
    const Id space{H5Dget_space(dataset), H5Sclose}, type{H5Dget_type(dataset), H5Tclose};
    return {shape_of(space, name), dtype_of_type(type, name)};
  }

  Tensor read(hid_t dataset, const std::string& name, DType dtype, const Shape& first,
              const Shape& count) const {
    Tensor result = Tensor::empty(count, dtype);
    if (result.numel() == 0) return result;
    const Id file_space{H5Dget_space(dataset), H5Sclose}, file_type{H5Dget_type(dataset), H5Tclose};
    const Id memory_space = space_of(count);
    if (count.dim() > 0) {
      hsize_t start[Shape::max_axes], sizes[Shape::max_axes];
      std::copy(first.begin(), first.end(), start);
      std::copy(count.begin(), count.end(), sizes);
      H5Sselect_hyperslab(file_space, H5S_SELECT_SET, start, nullptr, sizes, nullptr);
    }
    const bool may_overflow = is_unsigned_64(file_type);
    const Id type = may_overflow ? Id{H5Tcopy(H5T_NATIVE_UINT64), H5Tclose} : type_of(dtype);
    void* data = dispatch(dtype, [&](auto zero) -> void* { return result.mutable_data<decltype(zero)>(); });
    if (H5Dread(dataset, type, memory_space, file_space, H5P_DEFAULT, data) < 0)
      fail_at(path, "cannot read '", name, "': ", reason());
    if (may_overflow) check_signed(path, name, static_cast<const int64_t*>(data), result.numel());
    if (dtype == boolean) {  // a C++ bool holds nothing but 0 and 1
      auto* bytes = static_cast<uint8_t*>(data);
      for (int64_t i = 0; i < result.numel(); ++i) bytes[i] = bytes[i] != 0;
    }
    return result;
  }

  // Groups and datasets keep no times, so that equal contents make equal files.
  void create_group(const std::string& name) const {
    const Id options = plist(H5P_GROUP_CREATE);
    H5Pset_obj_track_times(options, false);
    for (size_t end = 0; end != std::string::npos;) {
      end = name.find('/', end + 1);
      const std::string part = name.substr(0, end);
      if (contains(part)) continue;
      const Id group{H5Gcreate2(root(), part.c_str(), H5P_DEFAULT, options, H5P_DEFAULT), H5Gclose};
      if (group < 0) fail_at(path, "cannot make the group '", part, "': ", reason());
    }
  }

  Id open_attribute(hid_t object, const std::string& name) const {
    if (H5Aexists(object, name.c_str()) == 0) fail_at(path, "has no attribute '", name, "'");
    Id attribute{H5Aopen(object, name.c_str(), H5P_DEFAULT), H5Aclose};
    if (attribute < 0) fail_at(path, "cannot open the attribute '", name, "': ", reason());
    return attribute;
  }

  void read_attribute(hid_t attribute, hid_t type, const std::string& name, void* into) const {
    if (H5Aread(attribute, type, into) < 0)
      fail_at(path, "cannot read the attribute '", name, "': ", reason());
  }

  // The elements of an attribute, in row-major order.
  void read_elements(hid_t attribute, const std::string& name, std::vector<int64_t>& into) const {
    const Id type{H5Aget_type(attribute), H5Tclose};
    if (is_floating(dtype_of_type(type, name))) fail_at(path, "the attribute '", name, "' is not an integer");
    const bool may_overflow = is_unsigned_64(type);
    read_attribute(attribute, may_overflow ? H5T_NATIVE_UINT64 : H5T_NATIVE_INT64, name, into.data());
    if (may_overflow) check_signed(path, name, into.data(), static_cast<int64_t>(into.size()));
  }

  void read_elements(hid_t attribute, const std::string& name, std::vector<double>& into) const {
    const Id type{H5Aget_type(attribute), H5Tclose};
    dtype_of_type(type, name);  // throws unless it is a number
    read_attribute(attribute, H5T_NATIVE_DOUBLE, name, into.data());
  }

  void read_elements(hid_t attribute, const std::string& name, std::vector<std::string>& into) const {
    const Id type{H5Aget_type(attribute), H5Tclose};
    if (H5Tget_class(type) != H5T_STRING) fail_at(path, "the attribute '", name, "' is not a string");
    if (H5Tis_variable_str(type) > 0) {
      std::vector<char*> texts(into.size(), nullptr);
      read_attribute(attribute, type, name, texts.data());
      for (size_t i = 0; i < texts.size(); ++i) into[i] = texts[i] ? texts[i] : "";
      const Id space{H5Aget_space(attribute), H5Sclose};
      H5Dvlen_reclaim(type, space, H5P_DEFAULT, texts.data());
      return;
    }
    const size_t length = H5Tget_size(type);
    const H5T_str_t padding = H5Tget_strpad(type);
    std::string all(length * into.size(), '\0');
    read_attribute(attribute, type, name, all.data());
    for (size_t i = 0; i < into.size(); ++i) {
      std::string& text = into[i] = all.substr(i * length, length);
      if (padding == H5T_STR_NULLTERM)
        text.erase(std::min(text.find('\0'), text.size()));
      else
        text.erase(text.find_last_not_of(padding == H5T_STR_NULLPAD ? '\0' : ' ') + 1);
    }
  }

  template <class T>
  std::vector<T> read_attribute_of(const std::string& object_name, const std::string& name) const {
    const Id object = open_object(object_name), attribute = open_attribute(object, name);
    const Id space{H5Aget_space(attribute), H5Sclose};
    std::vector<T> elements(static_cast<size_t>(shape_of(space, name).numel()));
    if (!elements.empty()) read_elements(attribute, name, elements);
    return elements;
  }

  void write_attribute(const std::string& object_name, const std::string& name, hid_t type,
                       const Shape& shape, const void* data) const {
    const Id object = open_object(object_name), space = space_of(shape);
    if (H5Aexists(object, name.c_str()) > 0) H5Adelete(object, name.c_str());
    const Id attribute{H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose};
    if (attribute < 0 || (shape.numel() > 0 && H5Awrite(attribute, type, data) < 0))
      fail_at(path, "cannot write the attribute '", name, "': ", reason());
  }

  void write_strings(const std::string& object, const std::string& name, const std::string* texts,
                     const Shape& shape) const {
    const auto count = static_cast<size_t>(shape.numel());
    size_t length = 1;
    for (size_t i = 0; i < count; ++i) length = std::max(length, texts[i].size());
    std::string all(length * count, '\0');
    for (size_t i = 0; i < count; ++i) all.replace(i * length, texts[i].size(), texts[i]);
    const Id type{H5Tcopy(H5T_C_S1), H5Tclose};
    H5Tset_size(type, length);
    H5Tset_strpad(type, H5T_STR_NULLPAD);
    H5Tset_cset(type, H5T_CSET_UTF8);
    write_attribute(object, name, type, shape, all.data());
  }

  void set(const std::string& object, const std::string& name, const std::string& value) const {
    write_strings(object, name, &value, {});
  }
  void set(const std::string& object, const std::string& name, int64_t value) const {
    write_attribute(object, name, H5T_NATIVE_INT64, {}, &value);
  }
  void set(const std::string& object, const std::string& name, double value) const {
    write_attribute(object, name, H5T_NATIVE_DOUBLE, {}, &value);
  }
  void set(const std::string& object, const std::string& name, const std::vector<std::string>& values) const {
    write_strings(object, name, values.data(), {static_cast<int64_t>(values.size())});
  }
  void set(const std::string& object, const std::string& name, const std::vector<int64_t>& values) const {
    write_attribute(object, name, H5T_NATIVE_INT64, {static_cast<int64_t>(values.size())}, values.data());
  }
  void set(const std::string& object, const std::string& name, const std::vector<double>& values) const {
    write_attribute(object, name, H5T_NATIVE_DOUBLE, {static_cast<int64_t>(values.size())}, values.data());
  }
};

Hdf5File::Hdf5File(std::unique_ptr<State> state) : state_(std::move(state)) {}
Hdf5File::Hdf5File(Hdf5File&&) noexcept = default;
Hdf5File& Hdf5File::operator=(Hdf5File&&) noexcept = default;
Hdf5File::~Hdf5File() = default;

const std::string& Hdf5File::path() const { return state_->path; }

Hdf5File Hdf5File::open(const std::string& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0 || ::access(path.c_str(), R_OK) != 0)
    fail_at(path, std::strerror(errno));
  if (S_ISDIR(status.st_mode)) fail_at(path, "is a folder");
  auto state = std::make_unique<State>();
  state->path = path;
  const Library library;
  state->file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  if (state->file < 0) fail_at(path, "not an HDF5 file, or damaged: ", reason());
  return Hdf5File(std::move(state));
}

Hdf5File Hdf5File::create(const std::string& path) {
  auto state = std::make_unique<State>();
  state->path = path;
  state->writable = true;
  const Library library;
  const Id creation = plist(H5P_FILE_CREATE), access = plist(H5P_FILE_ACCESS);
  H5Pset_obj_track_times(creation, false);
  H5Pset_libver_bounds(access, H5F_LIBVER_V110,
                       H5F_LIBVER_V110);  // the first format with checksums everywhere
  state->file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation, access);
  if (state->file < 0) fail_at(path, "cannot make the file: ", reason());
  return Hdf5File(std::move(state));
}

void Hdf5File::close() {
  std::string error;
  {
    const Library library;
    const hid_t file = state_->root();
    if (state_->writable && H5Fflush(file, H5F_SCOPE_GLOBAL) < 0) error = reason();
    state_->file = -1;
    if (H5Fclose(file) < 0 && error.empty()) error = reason();
  }
  if (!error.empty()) fail_at(path(), "cannot write: ", error);
  if (state_->writable) sync(path());
}

std::vector<Hdf5File::Entry> Hdf5File::list(const std::string& group) const {
  const Library library;
  const Id parent = state_->open_as(group, H5I_GROUP, "group");
  // In the order of the file: for any other the library builds a table, and crashes where damage stops it.
  std::vector<std::string> names;
  const auto note = [](hid_t, const char* name, const H5L_info_t*, void* into) -> herr_t {
    static_cast<std::vector<std::string>*>(into)->emplace_back(name);
    return 0;
  };
  if (H5Literate(parent, H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, note, &names) < 0)
    fail_at(path(), "cannot list '", group, "': ", reason());
  std::sort(names.begin(), names.end());
  std::vector<Entry> entries;
  for (const std::string& name : names) {
    const Id object{H5Oopen(parent, name.c_str(), H5P_DEFAULT), H5Oclose};
    if (object < 0) {
      // A soft or external link may lead nowhere; an object of this file must open.
      H5L_info_t link;
      if (H5Lget_info(parent, name.c_str(), &link, H5P_DEFAULT) >= 0 && link.type != H5L_TYPE_HARD) continue;
      fail_at(path(), "cannot open '", name, "' in '", group, "': ", reason());
    }
    const H5I_type_t kind = H5Iget_type(object);
    if (kind == H5I_GROUP || kind == H5I_DATASET) entries.push_back({name, kind == H5I_GROUP});
  }
  return entries;
}

bool Hdf5File::contains(const std::string& name) const {
  const Library library;
  return state_->contains(name);
}

Hdf5File::Dataset Hdf5File::dataset(const std::string& name) const {
  const Library library;
  return state_->describe(state_->open_as(name, H5I_DATASET, "dataset"), name);
}

Tensor Hdf5File::read(const std::string& name) const {
  const Library library;
  const Id dataset = state_->open_as(name, H5I_DATASET, "dataset");
  const auto [shape, dtype] = state_->describe(dataset, name);
  Shape first = shape;
  std::fill_n(&first[0], first.dim(), 0);
  return state_->read(dataset, name, dtype, first, shape);
}

Tensor Hdf5File::read(const std::string& name, const Shape& shape, DType dtype) const {
  const Dataset found = dataset(name);
  if (found.shape != shape || found.dtype != dtype)
    fail_at(path(), "'", name, "' must be ", dtype, " ", shape, ", got ", found.dtype, " ", found.shape);
  return read(name);
}

Tensor Hdf5File::read_box(const std::string& name, const Shape& first, const Shape& count) const {
  const Library library;
  const Id dataset = state_->open_as(name, H5I_DATASET, "dataset");
  const auto [shape, dtype] = state_->describe(dataset, name);
  bool inside = first.dim() == shape.dim() && count.dim() == shape.dim();
  for (int axis = 0; inside && axis < shape.dim(); ++axis)
    inside = first[axis] >= 0 && count[axis] >= 0 && first[axis] <= shape[axis] &&
             count[axis] <= shape[axis] - first[axis];
  if (!inside)
    fail_at(path(), "'", name, "' has shape ", shape, "; no box of ", count, " begins at ", first, " in it");
  return state_->read(dataset, name, dtype, first, count);
}

void Hdf5File::write(const std::string& name, const Tensor& tensor) {
  check(tensor.defined(), Error::Kind::Value, "[hdf5] the tensor '", name, "' is undefined");
  const Tensor values = tensor.to(cpu).contiguous();
  const Library library;
  if (state_->contains(name)) fail_at(path(), "'", name, "' is there already");
  if (const size_t slash = name.find_last_of('/'); slash != std::string::npos && slash > 0)
    state_->create_group(name.substr(0, slash));
  const Id type = type_of(values.dtype()), space = space_of(values.shape()),
           options = plist(H5P_DATASET_CREATE);
  H5Pset_obj_track_times(options, false);
  set_layout(options, values.shape(), size_of(values.dtype()));
  const Id dataset{H5Dcreate2(state_->root(), name.c_str(), type, space, H5P_DEFAULT, options, H5P_DEFAULT),
                   H5Dclose};
  const void* data =
      dispatch(values.dtype(), [&](auto zero) -> const void* { return values.data<decltype(zero)>(); });
  if (dataset < 0 || (values.numel() > 0 && H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) < 0))
    fail_at(path(), "cannot write '", name, "': ", reason());
}

void Hdf5File::create_group(const std::string& name) {
  const Library library;
  state_->create_group(name);
}

void Hdf5File::set_attribute(const std::string& object, const std::string& name, const Hdf5Value& value) {
  const Library library;
  std::visit([&](const auto& held) { state_->set(object, name, held); }, value);
}

bool Hdf5File::has_attribute(const std::string& object, const std::string& name) const {
  const Library library;
  return H5Aexists(state_->open_object(object), name.c_str()) > 0;
}

namespace {
template <class T>
struct Element {
  using Type = T;
  static constexpr bool is_array = false;
};
template <class T>
struct Element<std::vector<T>> {
  using Type = T;
  static constexpr bool is_array = true;
};
}  // namespace

template <class T>
T Hdf5File::attribute(const std::string& object, const std::string& name) const {
  const Library library;
  auto elements = state_->read_attribute_of<typename Element<T>::Type>(object, name);
  if constexpr (Element<T>::is_array) {
    return elements;
  } else {
    if (elements.size() != 1)
      fail_at(path(), "the attribute '", name, "' must have one element, got ", elements.size());
    return elements[0];
  }
}

template std::string Hdf5File::attribute(const std::string&, const std::string&) const;
template int64_t Hdf5File::attribute(const std::string&, const std::string&) const;
template double Hdf5File::attribute(const std::string&, const std::string&) const;
template std::vector<std::string> Hdf5File::attribute(const std::string&, const std::string&) const;
template std::vector<int64_t> Hdf5File::attribute(const std::string&, const std::string&) const;
template std::vector<double> Hdf5File::attribute(const std::string&, const std::string&) const;

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
