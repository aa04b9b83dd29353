// What the files of the HDF5 room share: its lock, handles that close themselves, and open files. Not
// installed.
#pragma once

#include <hdf5.h>

#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "torus/core/hdf5.h"

namespace torus {

namespace h5 {

/// The lock of the library. While it is held, HDF5 keeps its error stack to itself. In a child of fork, the
/// first to take it drops every handle of the parent, so that each file is opened again when next used.
class Library {
 public:
  Library();
  ~Library() { H5Eset_auto2(H5E_DEFAULT, print_, data_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

 private:
  std::lock_guard<std::mutex> lock_;
  H5E_auto2_t print_ = nullptr;
  void* data_ = nullptr;
};

/// What the library says of its last failure, in one line.
std::string reason();

template <class... Parts>
[[noreturn]] void fail_at(const std::string& path, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  fail(Error::Kind::File, "[hdf5] ", path, ": ", printable(text.str()));
}

/// A handle of the library, closed with the function that fits it.
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
  ~Id() { reset(); }
  void reset() {
    if (id_ >= 0) close_(id_);
    id_ = -1;
  }
  operator hid_t() const { return id_; }

 private:
  hid_t id_ = -1;
  herr_t (*close_)(hid_t) = nullptr;
};

inline Id plist(hid_t kind) { return {H5Pcreate(kind), H5Pclose}; }
Id space_of(const Shape& shape);
/// How a dtype lies in memory; in files we write, little-endian, the same.
Id type_of(DType dtype);
/// The dtype that holds every value of a type. False if there is none, or if the type is malformed.
bool find_dtype(hid_t type, DType& dtype);
bool is_unsigned_64(hid_t type);
/// The same for complex numbers: records of two numbers named r and i, real and imag, or re and im.
bool find_complex(hid_t type, DType& dtype);
/// True for records whose members lie inside them.
bool is_compound(hid_t type);
std::string member_name(hid_t type, int index);
Id member_type(hid_t type, int index);
/// "i16", "complex f32 {r, i}": as Hdf5Info::type.
std::string name_of(hid_t type);

/// Adds the filters that the library lacks: lzf, to read.
void register_filters();
/// "deflate", or the number of one without a name; `package`: what brings it.
std::string filter_name(int id);
std::string filter_package(int id);

}  // namespace h5

struct Hdf5File::State {
  std::string path;
  hid_t file = -1;
  bool writable = false, closed = false;
  Hdf5Trust trust;
  std::set<Hdf5Dataset::State*> datasets;  // whose handles go before the file's does

  ~State();

  /// The root; opens the file again where its handle was dropped, and throws once it is closed.
  hid_t root();
  /// Opens the file to read.
  void open();
  /// Gives back every handle; a file to read is opened again when it is used.
  void drop();

  /// The path of an object through hard links alone, and each link looked at before it is followed; nothing
  /// if there is no such object. Throws on a link out of the file and on a cycle of links.
  std::optional<std::string> resolve(const std::string& name);
  h5::Id open_object(const std::string& name);
  h5::Id open_as(const std::string& name, H5I_type_t kind, const char* what);
  void create_group(const std::string& name);
  h5::Id create_dataset(const std::string& name, const Shape& shape, DType dtype);
  /// The sizes of an attribute's or a dataset's axes.
  Shape shape_of(hid_t space, const std::string& name) const;
  /// The text of an attribute or a dataset, `object`, in row-major order. `read` fills memory of a type.
  std::vector<std::string> read_strings(hid_t object, hid_t type, hid_t space, const std::string& name,
                                        const std::function<herr_t(hid_t type, void* into)>& read) const;
};

/// An open dataset. Its handle lives no longer than its file's.
struct Hdf5Dataset::State {
  std::shared_ptr<Hdf5File::State> file;
  std::string name;
  int64_t cache_bytes = 0;
  Hdf5Info info;
  h5::Id handle;

  State(std::shared_ptr<Hdf5File::State> of, std::string named, int64_t cache);
  ~State();
  /// The handle, opened again where it was dropped.
  hid_t id();
  /// What the file says; nothing of it is checked but the type.
  Hdf5Info describe();
  /// Throws where the library must not be asked to read.
  void check_readable() const;
  void check_inside(const Shape& first, const Shape& count, const Shape& step) const;
  void read(void* into, hid_t memory_type, const Shape& first, const Shape& count, const Shape& step,
            hid_t options);

 private:
  h5::Id open() const;
};

}  // namespace torus
