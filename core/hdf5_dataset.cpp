// Reading datasets: first what the file says of them, then whether the library can be asked, then the
// elements.
#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>

#include "torus/core/hdf5_handles.h"
#include "torus/core/hdf5_lists.h"

namespace torus {

using namespace h5;

namespace {

constexpr int64_t most_chunk_bytes = int64_t{1} << 30;
constexpr int64_t most_packing = 1100;  // deflate, which packs most, reaches 1032
constexpr int64_t small_cache = int64_t{64} << 20, large_cache = int64_t{512} << 20;

int64_t file_bytes(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0 ? status.st_size : 0;
}

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> parts;
  std::istringstream in(path);
  for (std::string part; std::getline(in, part, '/');) parts.push_back(part);
  return parts;
}

// A member of a record that is a number or an array of numbers, and where it goes in memory: 8 bytes each.
struct Leaf {
  std::string path;
  bool floating = false;
  int64_t count = 1;
  bool is_array = false;
  size_t offset = 0;
};

// The type in memory of one number or array of them, and its count; nothing for other types.
std::optional<Id> leaf_type(hid_t type, Leaf& leaf) {
  std::vector<hsize_t> sizes;
  Id base{H5Tcopy(type), H5Tclose};
  if (H5Tget_class(type) == H5T_ARRAY) {
    const int axes = H5Tget_array_ndims(type);
    if (axes < 1 || axes > Shape::max_axes) return std::nullopt;
    sizes.resize(static_cast<size_t>(axes));
    H5Tget_array_dims2(type, sizes.data());
    base = Id{H5Tget_super(type), H5Tclose};
    leaf.is_array = true;
    for (const hsize_t size : sizes) {
      if (size == 0 || size > 4096 || leaf.count > 4096) return std::nullopt;
      leaf.count *= static_cast<int64_t>(size);
    }
  }
  DType dtype = f32;
  if (!find_dtype(base, dtype)) return std::nullopt;
  leaf.floating = is_floating(dtype);
  Id number{H5Tcopy(leaf.floating          ? H5T_NATIVE_DOUBLE
                    : is_unsigned_64(base) ? H5T_NATIVE_UINT64
                                           : H5T_NATIVE_INT64),
            H5Tclose};
  if (H5Tget_class(base) == H5T_ENUM) return std::nullopt;
  if (sizes.empty()) return number;
  return Id{H5Tarray_create2(number, static_cast<unsigned>(sizes.size()), sizes.data()), H5Tclose};
}

using Request = std::pair<std::vector<std::string>, Leaf*>;  // the rest of a path, and whose it is

// The type in memory of a record that holds only what is requested, without gaps.
Id record_type(hid_t type, const std::vector<Request>& requests, const Hdf5Dataset::State& of) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<Request>> groups;
  for (const auto& [path, leaf] : requests) {
    if (!groups.contains(path[0])) order.push_back(path[0]);
    groups[path[0]].emplace_back(std::vector<std::string>(path.begin() + 1, path.end()), leaf);
  }
  std::vector<Id> types;
  size_t size = 0;
  for (const std::string& part : order) {
    const auto& group = groups[part];
    const int index = is_compound(type) ? H5Tget_member_index(type, part.c_str()) : -1;
    if (index < 0)
      fail_at(of.file->path, "'", of.name, "' has records without '", group[0].second->path,
              "', but: ", name_of(type));
    const Id member = member_type(type, index);
    if (group[0].first.empty()) {
      auto found = leaf_type(member, *group[0].second);
      if (!found)
        fail_at(of.file->path, "'", of.name, "' has '", group[0].second->path, "' of its records as ",
                name_of(member), ", no number");
      types.push_back(std::move(*found));
    } else {
      types.push_back(record_type(member, group, of));
    }
    for (const auto& request : group) request.second->offset += size;
    size += H5Tget_size(types.back());
  }
  Id result{H5Tcreate(H5T_COMPOUND, std::max<size_t>(size, 1)), H5Tclose};
  size = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    H5Tinsert(result, order[i].c_str(), size, types[i]);
    size += H5Tget_size(types[i]);
  }
  return result;
}

// Where a reference to a list lies in an element in memory, and the bytes of an item; 0: lists of lists.
struct Reference {
  size_t offset, item_bytes;
};

// A type in memory of the file's, in which lists are references that the library does not follow.
Id unfollowed_type(hid_t type, const Lists& lists, size_t offset, std::vector<Reference>& references) {
  const H5T_class_t kind = H5Tget_class(type);
  if (kind == H5T_VLEN || H5Tis_variable_str(type) > 0) {
    const Id item{kind == H5T_VLEN ? H5Tget_super(type) : H5Tcopy(H5T_C_S1), H5Tclose};
    const bool is_nested = H5Tdetect_class(item, H5T_VLEN) > 0 || H5Tdetect_class(item, H5T_STRING) > 0;
    references.push_back({offset, kind == H5T_VLEN && is_nested ? 0 : H5Tget_size(item)});
    return lists.reference_type();
  }
  if (!is_compound(type)) return {H5Tget_native_type(type, H5T_DIR_ASCEND), H5Tclose};
  std::vector<Id> members;
  size_t size = 0;
  for (int i = 0; i < H5Tget_nmembers(type); ++i) {
    members.push_back(unfollowed_type(member_type(type, i), lists, offset + size, references));
    if (members.back() < 0) return {};
    size += H5Tget_size(members.back());
  }
  Id result{H5Tcreate(H5T_COMPOUND, std::max<size_t>(1, size)), H5Tclose};
  size = 0;
  for (size_t i = 0; i < members.size(); size += H5Tget_size(members[i++]))
    H5Tinsert(result, member_name(type, static_cast<int>(i)).c_str(), size, members[i]);
  return result;
}

void list_members(hid_t type, const std::string& prefix, int depth, std::vector<std::string>& into) {
  if (!is_compound(type) || depth > 8) return;
  for (int i = 0; i < H5Tget_nmembers(type); ++i) {
    const Id member = member_type(type, i);
    const std::string path = prefix + member_name(type, i);
    Leaf leaf;
    if (leaf_type(member, leaf))
      into.push_back(path);
    else
      list_members(member, path + "/", depth + 1, into);
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------- the handle

Hdf5Dataset::State::State(std::shared_ptr<Hdf5File::State> of, std::string named, int64_t cache)
    : file(std::move(of)), name(std::move(named)), cache_bytes(cache) {
  handle = file->open_as(name, H5I_DATASET, "dataset");
  info = describe();
  handle.reset();
  file->datasets.insert(this);
}

Hdf5Dataset::State::~State() {
  const Library library;
  file->datasets.erase(this);
  handle.reset();
}

Hdf5Info Hdf5Dataset::State::describe() {
  const auto fail_here = [&](const auto&... parts) { fail_at(file->path, "'", name, "' ", parts...); };
  const Id options{H5Dget_create_plist(handle), H5Pclose};
  const H5D_layout_t layout = H5Pget_layout(options);
  if (!file->trust.other_files && (layout == H5D_VIRTUAL || H5Pget_external_count(options) > 0))
    fail_here("keeps its elements in other files; only a file that is trusted may name others");
  const Id space{H5Dget_space(handle), H5Sclose}, type{H5Dget_type(handle), H5Tclose};
  if (space < 0 || type < 0) fail_here("is damaged: ", reason());
  Hdf5Info result;
  result.type = name_of(type);
  result.element_bytes = static_cast<int64_t>(H5Tget_size(type));
  result.stored_bytes = static_cast<int64_t>(H5Dget_storage_size(handle));
  result.empty = H5Sget_simple_extent_type(space) == H5S_NULL;
  if (!result.empty) result.shape = file->shape_of(space, name);
  if (find_dtype(type, result.dtype))
    result.kind = Hdf5Info::Kind::number;
  else if (find_complex(type, result.dtype))
    result.kind = Hdf5Info::Kind::complex;
  else if (H5Tget_class(type) == H5T_STRING)
    result.kind = Hdf5Info::Kind::text;
  else if (is_compound(type))
    result.kind = Hdf5Info::Kind::records;
  if (layout == H5D_CHUNKED) {
    hsize_t sizes[H5S_MAX_RANK] = {};
    if (H5Pget_chunk(options, H5S_MAX_RANK, sizes) != result.shape.dim())
      fail_here("has chunks of another rank");
    for (int axis = 0; axis < result.shape.dim(); ++axis)
      result.chunk.push_back(static_cast<int64_t>(sizes[axis]));
  }
  const int filters = std::max(0, H5Pget_nfilters(options));
  for (int i = 0; i < filters; ++i) {
    unsigned flags = 0, config = 0;
    size_t values = 0;
    const int id =
        H5Pget_filter2(options, static_cast<unsigned>(i), &flags, &values, nullptr, 0, nullptr, &config);
    if (id >= 0) result.filters.push_back({id, filter_name(id), H5Zfilter_avail(id) > 0});
  }
  return result;
}

Id Hdf5Dataset::State::open() const {
  // Hashed slots: about ten for each chunk that the cache holds.
  const Id access = plist(H5P_DATASET_ACCESS);
  if (info.chunk.dim() > 0) {
    int64_t layer = 1;  // the chunks that one slice of the first axis meets
    for (int axis = 1; axis < info.shape.dim(); ++axis)
      layer *= (info.shape[axis] + info.chunk[axis] - 1) / std::max<int64_t>(1, info.chunk[axis]);
    const double chunk_bytes =
        static_cast<double>(info.chunk.numel()) * static_cast<double>(info.element_bytes);
    const double wanted =
        std::clamp(static_cast<double>(layer) * chunk_bytes, double{small_cache}, double{large_cache});
    const double bytes = cache_bytes > 0 ? static_cast<double>(cache_bytes) : wanted;
    const double slots = std::clamp(10 * bytes / std::max(chunk_bytes, 1.), 521., 1e6);
    H5Pset_chunk_cache(access, static_cast<size_t>(slots) | 1, static_cast<size_t>(bytes), 0.75);
  }
  const auto where = file->resolve(name);
  if (!where) fail_at(file->path, "has no '", name, "' any more");
  Id result{H5Dopen2(file->root(), where->c_str(), access), H5Dclose};
  if (result < 0) fail_at(file->path, "cannot open '", name, "': ", reason());
  return result;
}

hid_t Hdf5Dataset::State::id() {
  file->root();  // opens the file again where it was dropped
  if (handle >= 0) return handle;
  handle = open();
  const Id space{H5Dget_space(handle), H5Sclose}, type{H5Dget_type(handle), H5Tclose};
  if (!info.empty && (file->shape_of(space, name) != info.shape || name_of(type) != info.type)) {
    handle.reset();
    fail_at(file->path, "'", name, "' has changed since it was opened");
  }
  return handle;
}

void Hdf5Dataset::State::check_readable() const {
  const auto fail_here = [&](const auto&... parts) { fail_at(file->path, "'", name, "' ", parts...); };
  if (info.empty) fail_here("is empty");
  for (const auto& filter : info.filters)
    if (!filter.available)
      fail_here("is packed with ", filter.name, " (filter ", filter.id, "), which is not available; install ",
                filter_package(filter.id));
  if (info.chunk.dim() > 0 &&
      info.chunk.numel() > most_chunk_bytes / std::max<int64_t>(1, info.element_bytes))
    fail_here("has chunks of ", info.chunk, " elements of ", info.element_bytes,
              " bytes; at most 1 GiB are read");
  if (file->writable) return;  // what we write ourselves may not be on the disk yet
  const double declared = static_cast<double>(info.shape.numel()) * static_cast<double>(info.element_bytes);
  if (!file->trust.other_files && info.stored_bytes > file_bytes(file->path))
    fail_here("claims ", info.stored_bytes, " stored bytes; the file has ", file_bytes(file->path));
  if (!file->trust.sparse && declared > double{1 << 20} &&
      declared > static_cast<double>(info.stored_bytes) * double{most_packing})
    fail_here("declares ", static_cast<int64_t>(declared), " bytes but stores ", info.stored_bytes,
              "; only a file that is trusted may be so sparse");
}

void Hdf5Dataset::State::check_inside(const Shape& first, const Shape& count, const Shape& step) const {
  const Shape& shape = info.shape;
  const int axes = shape.dim();
  bool inside = first.dim() == axes && count.dim() == axes && (step.dim() == 0 || step.dim() == axes);
  for (int axis = 0; inside && axis < axes; ++axis) {
    const int64_t by = step.dim() == 0 ? 1 : step[axis];
    inside = by >= 1 && first[axis] >= 0 && count[axis] >= 0 && first[axis] <= shape[axis] &&
             (count[axis] == 0 ||
              (first[axis] < shape[axis] && count[axis] - 1 <= (shape[axis] - 1 - first[axis]) / by));
  }
  if (!inside)
    fail_at(file->path, "'", name, "' has shape ", shape, "; no box of ", count, " begins at ", first,
            " in it");
}

void Hdf5Dataset::State::read(void* into, hid_t memory_type, const Shape& first, const Shape& count,
                              const Shape& step, hid_t options) {
  check_readable();
  const Id file_space{H5Dget_space(id()), H5Sclose}, memory_space = space_of(count);
  if (count.dim() > 0) {
    hsize_t start[Shape::max_axes], sizes[Shape::max_axes], steps[Shape::max_axes];
    std::copy(first.begin(), first.end(), start);
    std::copy(count.begin(), count.end(), sizes);
    std::copy(step.begin(), step.end(), steps);
    H5Sselect_hyperslab(file_space, H5S_SELECT_SET, start, step.dim() > 0 ? steps : nullptr, sizes, nullptr);
  }
  if (H5Dread(handle, memory_type, memory_space, file_space, options, into) >= 0) return;
  const std::string why = reason();
  fail_at(file->path, "cannot read '", name, "' at ", first, ": ", why);
}

// ---------------------------------------------------------------------------------------- what users call

const Hdf5Info& Hdf5Dataset::info() const { return state_->info; }
const std::string& Hdf5Dataset::name() const { return state_->name; }

Tensor Hdf5Dataset::read(const Shape& first, const Shape& count, DType dtype, const Shape& step) const {
  Shape shape = count;
  {
    const Library library;
    state_->check_inside(first, count, step);
    state_->check_readable();
  }
  if (state_->info.kind == Hdf5Info::Kind::complex) shape.push_back(2);
  Tensor result = Tensor::empty(shape, dtype);
  read_into(result, first, count, step);
  return result;
}

void Hdf5Dataset::read_into(Tensor& into, const Shape& first, const Shape& count, const Shape& step) const {
  const Library library;
  const Hdf5Info& info = state_->info;
  const bool is_complex = info.kind == Hdf5Info::Kind::complex;
  check(into.defined(), Error::Kind::Value, "[hdf5] the tensor to read into is undefined");
  const DType dtype = into.dtype();
  if (!is_complex && info.kind != Hdf5Info::Kind::number)
    fail_at(state_->file->path, "'", state_->name,
            "' has elements of a type that no dtype holds: ", info.type);
  check(dtype == f32 || dtype == f64 || dtype == info.dtype, Error::Kind::DType, "[hdf5] '", state_->name,
        "' reads as f32, f64 or ", info.dtype, ", not as ", dtype);
  state_->check_inside(first, count, step);
  check(into.numel() == count.numel() * (is_complex ? 2 : 1), Error::Kind::Shape, "[hdf5] a box of ", count,
        is_complex ? " complex numbers" : "", " does not fit into ", into.shape());
  check(into.is_contiguous() && into.device() == cpu, Error::Kind::Value,
        "[hdf5] expected a contiguous tensor on the CPU to read into");
  if (into.numel() == 0) return;

  Id type = type_of(dtype);
  const Id file_type{H5Dget_type(state_->id()), H5Tclose};
  if (is_complex) {
    const size_t part = size_of(dtype);
    Id pair{H5Tcreate(H5T_COMPOUND, 2 * part), H5Tclose};
    for (int i : {0, 1}) H5Tinsert(pair, member_name(file_type, i).c_str(), i * part, type);
    type = std::move(pair);
  }
  const bool may_overflow = dtype == i64 && is_unsigned_64(file_type);
  if (may_overflow) type = Id{H5Tcopy(H5T_NATIVE_UINT64), H5Tclose};
  void* data = dispatch(dtype, [&](auto zero) -> void* { return into.mutable_data<decltype(zero)>(); });
  state_->read(data, type, first, count, step, H5P_DEFAULT);
  if (may_overflow) {
    const auto* values = static_cast<const int64_t*>(data);
    if (std::any_of(values, values + into.numel(), [](int64_t value) { return value < 0; }))
      fail_at(state_->file->path, "'", state_->name, "' holds unsigned integers above 2^63 - 1");
  }
  if (dtype == boolean) {  // a C++ bool holds nothing but 0 and 1
    auto* bytes = static_cast<uint8_t*>(data);
    for (int64_t i = 0; i < into.numel(); ++i) bytes[i] = bytes[i] != 0;
  }
}

std::vector<std::string> Hdf5Dataset::members() const {
  const Library library;
  std::vector<std::string> result;
  list_members(Id{H5Dget_type(state_->id()), H5Tclose}, "", 0, result);
  return result;
}

std::vector<Tensor> Hdf5Dataset::read_members(const std::vector<std::string>& members, int64_t first,
                                              int64_t count) const {
  const Library library;
  state_->check_inside({first}, {count}, {});
  state_->check_readable();
  const Id file_type{H5Dget_type(state_->id()), H5Tclose};
  std::vector<Leaf> leaves(members.size());
  std::vector<Request> requests;
  for (size_t i = 0; i < members.size(); ++i) {
    leaves[i].path = members[i];
    requests.emplace_back(split(members[i]), &leaves[i]);
  }
  const Id type = record_type(file_type, requests, *state_);
  const size_t size = H5Tget_size(type);
  std::vector<Tensor> result;
  for (const Leaf& leaf : leaves)
    result.push_back(
        Tensor::empty(leaf.is_array ? Shape{count, leaf.count} : Shape{count}, leaf.floating ? f64 : i64));
  const int64_t piece = std::max<int64_t>(1, (int64_t{4} << 20) / static_cast<int64_t>(size));
  std::vector<char> buffer(static_cast<size_t>(std::min(piece, std::max<int64_t>(count, 1))) * size);
  for (int64_t at = 0; at < count; at += piece) {
    const int64_t rows = std::min(piece, count - at);
    state_->read(buffer.data(), type, {first + at}, {rows}, {}, H5P_DEFAULT);
    for (size_t i = 0; i < leaves.size(); ++i) {
      const size_t bytes = static_cast<size_t>(leaves[i].count) * 8;
      char* out = leaves[i].floating ? reinterpret_cast<char*>(result[i].mutable_data<double>())
                                     : reinterpret_cast<char*>(result[i].mutable_data<int64_t>());
      for (int64_t row = 0; row < rows; ++row)
        std::copy_n(buffer.data() + static_cast<size_t>(row) * size + leaves[i].offset, bytes,
                    out + static_cast<size_t>(at + row) * bytes);
    }
  }
  return result;
}

std::vector<float> Hdf5Dataset::read_lists(const std::string& member, int64_t first,
                                           const std::vector<int64_t>& lengths) const {
  const Library library;
  const auto fail_here = [&](const auto&... parts) {
    fail_at(state_->file->path, "'", state_->name, "' ", parts...);
  };
  const auto count = static_cast<int64_t>(lengths.size());
  state_->check_inside({first}, {count}, {});
  state_->check_readable();
  const Id file_type{H5Dget_type(state_->id()), H5Tclose};
  const int index = is_compound(file_type) ? H5Tget_member_index(file_type, member.c_str()) : -1;
  if (index < 0) fail_here("has records without '", member, "', but: ", state_->info.type);
  const Id list = member_type(file_type, index);
  const Id item{H5Tget_class(list) == H5T_VLEN ? H5Tget_super(list) : -1, H5Tclose};
  DType dtype = f32;
  if (item < 0 || !find_dtype(item, dtype))
    fail_here("has '", member, "' of its records as ", name_of(list), ", not as lists of numbers");
  std::vector<float> result;
  if (count == 0) return result;
  Lists lists(state_->id(), state_->file->path, state_->name);
  const size_t item_bytes = H5Tget_size(item), reference_bytes = lists.reference_bytes();
  const bool is_float = H5Tequal(item, H5T_NATIVE_FLOAT) > 0;
  const Id type{H5Tcreate(H5T_COMPOUND, reference_bytes), H5Tclose};
  H5Tinsert(type, member.c_str(), 0, lists.reference_type());
  std::vector<char> references(lengths.size() * reference_bytes), converted;
  state_->read(references.data(), type, {first}, {count}, {}, H5P_DEFAULT);
  for (size_t i = 0; i < lengths.size(); ++i) {
    const char* reference = references.data() + i * reference_bytes;
    if (const int64_t items = lists.length(reference); items != lengths[i])
      fail_here("must have ", lengths[i], " numbers in '", member, "' of record ",
                first + static_cast<int64_t>(i), ", got ", items);
    std::string_view bytes = lists.find(reference, item_bytes);
    const size_t items = bytes.size() / item_bytes, before = result.size();
    if (!is_float) {
      converted.assign(bytes.begin(), bytes.end());
      converted.resize(items * std::max(item_bytes, sizeof(float)));
      if (H5Tconvert(item, H5T_NATIVE_FLOAT, items, converted.data(), nullptr, H5P_DEFAULT) < 0)
        fail_here("cannot be read as floats: ", reason());
      bytes = {converted.data(), items * sizeof(float)};
    }
    result.resize(before + items);
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(result.data() + before));
  }
  return result;
}

void Hdf5Dataset::verify() const {
  constexpr int64_t piece_bytes = int64_t{32} << 20;
  const Library library;
  const Hdf5Info& info = state_->info;
  if (info.empty) return;
  state_->check_readable();
  const Id file_type{H5Dget_type(state_->id()), H5Tclose};
  Lists lists(state_->id(), state_->file->path, state_->name);
  std::vector<Reference> references;
  const Id type = unfollowed_type(file_type, lists, 0, references);
  if (type < 0) fail_at(state_->file->path, "'", state_->name, "' has an unusable type: ", reason());
  const int64_t element = static_cast<int64_t>(H5Tget_size(type));
  // Whole chunks, as many as a piece holds; the last axes are covered first.
  const int axes = info.shape.dim();
  Shape piece = info.shape, first = info.shape, count = info.shape;
  for (int axis = 0; axis < axes && piece.numel() > std::max<int64_t>(1, piece_bytes / element); ++axis) {
    const int64_t least = info.chunk.dim() > 0 ? std::min(info.chunk[axis], info.shape[axis]) : 1;
    const int64_t rest = piece.numel() / piece[axis];
    const int64_t fitting = std::max<int64_t>(1, piece_bytes / element / std::max<int64_t>(1, rest));
    piece[axis] = std::max(least, fitting / least * least);
  }
  if (info.shape.numel() == 0) return;
  std::vector<char> buffer(static_cast<size_t>(piece.numel()) * static_cast<size_t>(element));
  for (int axis = 0; axis < axes; ++axis) first[axis] = 0;
  for (;;) {
    for (int axis = 0; axis < axes; ++axis)
      count[axis] = std::min(piece[axis], info.shape[axis] - first[axis]);
    state_->read(buffer.data(), type, first, count, {}, H5P_DEFAULT);
    for (int64_t i = 0; !references.empty() && i < count.numel(); ++i)
      for (const auto& [offset, item_bytes] : references)
        lists.find(buffer.data() + static_cast<size_t>(i * element) + offset, item_bytes);
    int axis = axes - 1;
    while (axis >= 0 && (first[axis] += piece[axis]) >= info.shape[axis]) first[axis--] = 0;
    if (axis < 0) return;
  }
}

Hdf5Info Hdf5File::describe(const std::string& name) const { return open_dataset(name).info(); }

Hdf5Dataset Hdf5File::open_dataset(const std::string& name, int64_t cache_bytes) const {
  std::shared_ptr<Hdf5Dataset::State> state;  // outlives the lock, should it go again
  const Library library;
  state = std::make_shared<Hdf5Dataset::State>(state_, name, cache_bytes);
  return Hdf5Dataset(std::move(state));
}

Hdf5File::Dataset Hdf5File::dataset(const std::string& name) const {
  const Hdf5Info info = describe(name);
  if (info.empty) h5::fail_at(path(), "'", name, "' has no shape");
  if (info.kind != Hdf5Info::Kind::number)
    h5::fail_at(path(), "'", name, "' has elements of a type that no dtype holds: ", info.type);
  return {info.shape, info.dtype};
}

Tensor Hdf5File::read(const std::string& name) const {
  const auto [shape, dtype] = dataset(name);
  Shape first = shape;
  std::fill_n(&first[0], first.dim(), 0);
  return open_dataset(name).read(first, shape, dtype);
}

Tensor Hdf5File::read(const std::string& name, const Shape& shape, DType dtype) const {
  const Dataset found = dataset(name);
  if (found.shape != shape || found.dtype != dtype)
    fail_at(path(), "'", name, "' must be ", dtype, " ", shape, ", got ", found.dtype, " ", found.shape);
  return read(name);
}

Tensor Hdf5File::read_box(const std::string& name, const Shape& first, const Shape& count) const {
  return open_dataset(name).read(first, count, dataset(name).dtype);
}

std::string Hdf5File::read_text(const std::string& name) const {
  const Hdf5Dataset dataset = open_dataset(name);
  const Library library;
  auto& state = *dataset.state_;
  state.check_readable();
  const Id type{H5Dget_type(state.id()), H5Tclose}, space{H5Dget_space(state.id()), H5Sclose};
  const auto texts = state_->read_strings(state.id(), type, space, name, [&](hid_t memory_type, void* into) {
    return H5Dread(state.handle, memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, into);
  });
  if (texts.size() != 1) fail_at(path(), "'", name, "' must be one text, got ", texts.size());
  return texts[0];
}

}  // namespace torus
