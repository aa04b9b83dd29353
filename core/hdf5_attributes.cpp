// Attributes, and text.
#include <algorithm>

#include "torus/core/hdf5_handles.h"
#include "torus/core/hdf5_lists.h"

namespace torus {

using namespace h5;

namespace {

constexpr int64_t most_bytes = int64_t{64} << 20;  // of one attribute, or of one dataset of text

// An attribute that is open, to read.
struct Attribute {
  Hdf5File::State& file;
  const std::string& name;
  Id id, type, space;

  Attribute(Hdf5File::State& in, hid_t object, const std::string& named) : file(in), name(named) {
    if (H5Aexists(object, name.c_str()) <= 0) fail_at(file.path, "has no attribute '", name, "'");
    id = Id{H5Aopen(object, name.c_str(), H5P_DEFAULT), H5Aclose};
    if (id < 0) fail_at(file.path, "cannot open the attribute '", name, "': ", reason());
    type = Id{H5Aget_type(id), H5Tclose};
    space = Id{H5Aget_space(id), H5Sclose};
  }

  bool is_empty() const { return H5Sget_simple_extent_type(space) == H5S_NULL; }

  int64_t count() const {
    const int64_t result = file.shape_of(space, name).numel();
    if (result > most_bytes / std::max<int64_t>(1, static_cast<int64_t>(H5Tget_size(type))))
      fail_at(file.path, "the attribute '", name, "' is too large to read: ", result, " elements");
    return result;
  }

  DType dtype() const {
    DType result = f32;
    if (!find_dtype(type, result))
      fail_at(file.path, "the attribute '", name, "' has a type that no dtype holds");
    return result;
  }

  void read(hid_t memory_type, void* into) const {
    if (H5Aread(id, memory_type, into) < 0)
      fail_at(file.path, "cannot read the attribute '", name, "': ", reason());
  }

  void read(std::vector<int64_t>& into) const {
    if (is_floating(dtype())) fail_at(file.path, "the attribute '", name, "' is not an integer");
    into.resize(static_cast<size_t>(count()));
    if (into.empty()) return;
    const bool may_overflow = is_unsigned_64(type);
    if (dtype() == boolean) {
      std::vector<int8_t> bytes(into.size());
      read(type_of(boolean), bytes.data());
      std::copy(bytes.begin(), bytes.end(), into.begin());
      return;
    }
    read(may_overflow ? H5T_NATIVE_UINT64 : H5T_NATIVE_INT64, into.data());
    if (may_overflow && std::any_of(into.begin(), into.end(), [](int64_t value) { return value < 0; }))
      fail_at(file.path, "'", name, "' holds unsigned integers above 2^63 - 1");
  }

  void read(std::vector<double>& into) const {
    dtype();  // throws unless it is a number
    into.resize(static_cast<size_t>(count()));
    if (!into.empty()) read(H5T_NATIVE_DOUBLE, into.data());
  }

  void read(std::vector<std::string>& into) const {
    if (H5Tget_class(type) != H5T_STRING) fail_at(file.path, "the attribute '", name, "' is not a string");
    into = file.read_strings(id, type, space, name, [this](hid_t memory_type, void* memory) {
      return H5Aread(id, memory_type, memory);
    });
  }
};

void write_attribute(Hdf5File::State& file, const std::string& object_name, const std::string& name,
                     hid_t type, const Shape& shape, const void* data) {
  const Id object = file.open_object(object_name), space = space_of(shape);
  if (H5Aexists(object, name.c_str()) > 0) H5Adelete(object, name.c_str());
  const Id attribute{H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose};
  if (attribute < 0 || (shape.numel() > 0 && H5Awrite(attribute, type, data) < 0))
    fail_at(file.path, "cannot write the attribute '", name, "': ", reason());
}

// What an attribute of these elements is written as.
void write_elements(Hdf5File::State& file, const std::string& object, const std::string& name,
                    const int64_t* values, const Shape& shape) {
  write_attribute(file, object, name, H5T_NATIVE_INT64, shape, values);
}
void write_elements(Hdf5File::State& file, const std::string& object, const std::string& name,
                    const double* values, const Shape& shape) {
  write_attribute(file, object, name, H5T_NATIVE_DOUBLE, shape, values);
}
void write_elements(Hdf5File::State& file, const std::string& object, const std::string& name,
                    const std::string* texts, const Shape& shape) {
  const auto count = static_cast<size_t>(shape.numel());
  size_t length = 1;
  for (size_t i = 0; i < count; ++i) length = std::max(length, texts[i].size());
  std::string all(length * count, '\0');
  for (size_t i = 0; i < count; ++i) all.replace(i * length, texts[i].size(), texts[i]);
  const Id type{H5Tcopy(H5T_C_S1), H5Tclose};
  H5Tset_size(type, length);
  H5Tset_strpad(type, H5T_STR_NULLPAD);
  H5Tset_cset(type, H5T_CSET_UTF8);
  write_attribute(file, object, name, type, shape, all.data());
}

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

std::vector<std::string> Hdf5File::State::read_strings(
    hid_t object, hid_t type, hid_t space, const std::string& name,
    const std::function<herr_t(hid_t, void*)>& read) const {
  const auto read_into = [&](hid_t memory_type, void* into) {
    if (read(memory_type, into) < 0) fail_at(path, "cannot read '", name, "': ", reason());
  };
  if (H5Tget_class(type) != H5T_STRING) fail_at(path, "'", name, "' is not text, but ", name_of(type));
  const int64_t count = shape_of(space, name).numel();
  const bool is_variable = H5Tis_variable_str(type) > 0;
  const size_t length = is_variable ? Lists::usual_reference_bytes : H5Tget_size(type);
  const auto fail_too_large = [&] { fail_at(path, "'", name, "' is too large to read: ", count, " texts"); };
  if (length == 0 || count > most_bytes / static_cast<int64_t>(std::min<size_t>(length, most_bytes)))
    fail_too_large();
  std::vector<std::string> result(static_cast<size_t>(count));
  if (count == 0) return result;
  if (is_variable) {
    Lists lists(object, path, name);
    std::vector<char> references(result.size() * lists.reference_bytes());
    read_into(lists.reference_type(), references.data());
    size_t total = 0;
    for (size_t i = 0; i < result.size(); ++i) {
      const std::string_view text = lists.find(references.data() + i * lists.reference_bytes(), 1);
      if ((total += text.size()) > most_bytes) fail_too_large();
      result[i] = text.substr(0, text.find('\0'));
    }
    return result;
  }
  const H5T_str_t padding = H5Tget_strpad(type);
  std::string all(length * result.size(), '\0');
  read_into(type, all.data());
  for (size_t i = 0; i < result.size(); ++i) {
    std::string& text = result[i] = all.substr(i * length, length);
    if (padding == H5T_STR_NULLTERM)
      text.erase(std::min(text.find('\0'), text.size()));
    else
      text.erase(text.find_last_not_of(padding == H5T_STR_NULLPAD ? '\0' : ' ') + 1);
  }
  return result;
}

void Hdf5File::set_attribute(const std::string& object, const std::string& name, const Hdf5Value& value) {
  const Library library;
  std::visit(
      [&](const auto& held) {
        if constexpr (Element<std::decay_t<decltype(held)>>::is_array)
          write_elements(*state_, object, name, held.data(), {static_cast<int64_t>(held.size())});
        else
          write_elements(*state_, object, name, &held, {});
      },
      value);
}

bool Hdf5File::has_attribute(const std::string& object, const std::string& name) const {
  const Library library;
  return H5Aexists(state_->open_object(object), name.c_str()) > 0;
}

template <class T>
T Hdf5File::attribute(const std::string& object, const std::string& name) const {
  const Library library;
  const Id holder = state_->open_object(object);
  std::vector<typename Element<T>::Type> elements;
  Attribute(*state_, holder, name).read(elements);
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

std::optional<Hdf5Value> Hdf5File::find_attribute(const std::string& object, const std::string& name) const {
  const Library library;
  const Id holder = state_->open_object(object);
  if (H5Aexists(holder, name.c_str()) <= 0) return std::nullopt;
  const Attribute attribute(*state_, holder, name);
  if (attribute.is_empty()) return std::nullopt;
  const auto value = [&](auto elements) -> Hdf5Value {
    attribute.read(elements);
    if (elements.size() == 1) return elements[0];
    return elements;
  };
  if (H5Tget_class(attribute.type) == H5T_STRING) return value(std::vector<std::string>());
  DType dtype = f32;
  if (!find_dtype(attribute.type, dtype)) return std::nullopt;
  if (is_floating(dtype)) return value(std::vector<double>());
  return value(std::vector<int64_t>());
}

std::vector<std::string> Hdf5File::attributes(const std::string& object) const {
  constexpr size_t most = 100000;
  const Library library;
  const Id holder = state_->open_object(object);
  std::vector<std::string> names;
  const auto note = [](hid_t, const char* name, const H5A_info_t*, void* into) -> herr_t {
    auto& list = *static_cast<std::vector<std::string>*>(into);
    list.emplace_back(name);
    return list.size() >= most ? 1 : 0;
  };
  if (H5Aiterate2(holder, H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, note, &names) < 0)
    fail_at(path(), "cannot list the attributes of '", object, "': ", reason());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace torus
