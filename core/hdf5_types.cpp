// Types of HDF5 and what they are in tensors.
#include <algorithm>

#include "torus/core/hdf5_handles.h"

namespace torus::h5 {

namespace {

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

}  // namespace

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

namespace {

bool is_boolean(hid_t type) {
  if (H5Tget_class(type) != H5T_ENUM || H5Tget_size(type) != 1 || H5Tget_nmembers(type) != 2) return false;
  int8_t no = -1, yes = -1;
  return H5Tenum_valueof(type, "FALSE", &no) >= 0 && H5Tenum_valueof(type, "TRUE", &yes) >= 0 && no == 0 &&
         yes == 1;
}

// The bits of a number lie inside its bytes, in an order that the library converts.
bool is_well_formed(hid_t type) {
  const size_t bits = 8 * H5Tget_size(type), precision = H5Tget_precision(type);
  const auto offset = static_cast<size_t>(std::max(0, H5Tget_offset(type)));
  const H5T_order_t order = H5Tget_order(type);
  if ((order != H5T_ORDER_LE && order != H5T_ORDER_BE) || precision == 0 || precision > bits ||
      offset > bits - precision)
    return false;
  if (H5Tget_class(type) != H5T_FLOAT) return true;
  size_t sign = 0, exponent_at = 0, exponent = 0, mantissa_at = 0, mantissa = 0;
  H5Tget_fields(type, &sign, &exponent_at, &exponent, &mantissa_at, &mantissa);
  const auto inside = [&](size_t at, size_t count) {
    return count > 0 && count <= bits && at <= bits - count;
  };
  const bool apart = exponent_at + exponent <= mantissa_at || mantissa_at + mantissa <= exponent_at;
  return inside(sign, 1) && inside(exponent_at, exponent) && inside(mantissa_at, mantissa) && apart;
}

}  // namespace

bool is_unsigned_64(hid_t type) {
  return H5Tget_class(type) == H5T_INTEGER && H5Tget_size(type) == 8 && H5Tget_sign(type) == H5T_SGN_NONE;
}

bool find_dtype(hid_t type, DType& dtype) {
  const size_t size = H5Tget_size(type);
  const H5T_class_t kind = H5Tget_class(type);
  if ((kind == H5T_INTEGER || kind == H5T_FLOAT) && !is_well_formed(type)) return false;
  switch (kind) {
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

Id space_of(const Shape& shape) {
  if (shape.dim() == 0) return {H5Screate(H5S_SCALAR), H5Sclose};
  hsize_t sizes[Shape::max_axes];
  std::copy(shape.begin(), shape.end(), sizes);
  return {H5Screate_simple(shape.dim(), sizes, nullptr), H5Sclose};
}

std::string name_of(hid_t type) {
  const size_t size = H5Tget_size(type);
  const std::string order = size > 1 && H5Tget_order(type) == H5T_ORDER_BE ? "big-endian " : "";
  const std::string bits = std::to_string(8 * size);
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
      return order + (H5Tget_sign(type) == H5T_SGN_2 ? "i" : "u") + bits;
    case H5T_FLOAT: {
      DType dtype = f32;
      return order + (find_dtype(type, dtype) && dtype == bf16 ? "bf" : "f") + bits;
    }
    case H5T_ENUM:
      return is_boolean(type) ? "bool" : "enum of " + name_of(Id{H5Tget_super(type), H5Tclose});
    case H5T_STRING:
      return H5Tis_variable_str(type) > 0 ? "text of variable length"
                                          : "text of " + std::to_string(size) + " bytes";
    case H5T_COMPOUND: {
      std::string parts;
      const int count = H5Tget_nmembers(type);
      for (int i = 0; i < std::min(count, 16); ++i) parts += (i ? ", " : "") + member_name(type, i);
      if (count > 16) parts += ", ...";
      DType dtype = f32;
      if (find_complex(type, dtype)) return "complex " + name_of(member_type(type, 0)) + " {" + parts + "}";
      return "records {" + parts + "}";
    }
    case H5T_VLEN:
      return "lists of " + name_of(Id{H5Tget_super(type), H5Tclose});
    case H5T_ARRAY:
      return "arrays of " + name_of(Id{H5Tget_super(type), H5Tclose});
    case H5T_REFERENCE:
      return "references";
    case H5T_BITFIELD:
      return "bits";
    case H5T_OPAQUE:
      return "opaque bytes";
    default:
      return "an unknown type";
  }
}

std::string member_name(hid_t type, int index) {
  char* text = H5Tget_member_name(type, static_cast<unsigned>(index));
  const std::string result = text ? text : "";
  if (text) H5free_memory(text);
  return result;
}

Id member_type(hid_t type, int index) {
  return {H5Tget_member_type(type, static_cast<unsigned>(index)), H5Tclose};
}

bool is_compound(hid_t type) {
  if (H5Tget_class(type) != H5T_COMPOUND) return false;
  const size_t size = H5Tget_size(type);
  for (int i = 0; i < H5Tget_nmembers(type); ++i) {
    const size_t at = H5Tget_member_offset(type, static_cast<unsigned>(i)),
                 bytes = H5Tget_size(member_type(type, i));
    if (bytes == 0 || bytes > size || at > size - bytes) return false;
  }
  return true;
}

bool find_complex(hid_t type, DType& dtype) {
  if (!is_compound(type) || H5Tget_nmembers(type) != 2) return false;
  const std::string real = member_name(type, 0), imaginary = member_name(type, 1);
  constexpr const char* names[][2] = {{"r", "i"}, {"real", "imag"}, {"re", "im"}};
  if (std::none_of(std::begin(names), std::end(names),
                   [&](const auto& pair) { return real == pair[0] && imaginary == pair[1]; }))
    return false;
  DType other = f32;
  for (int i : {0, 1})
    if (const H5T_class_t kind = H5Tget_class(member_type(type, i)); kind != H5T_INTEGER && kind != H5T_FLOAT)
      return false;
  return find_dtype(member_type(type, 0), dtype) && find_dtype(member_type(type, 1), other) && dtype == other;
}

}  // namespace torus::h5
