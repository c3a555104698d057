// Arrays between Python and C++.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <vector>

template <class T>
using In = nanobind::ndarray<const T, nanobind::c_contig, nanobind::device::cpu>;

template <class T>
std::vector<T> copy(const nanobind::object& owner, const char* name) {
  auto array = nanobind::cast<In<T>>(owner.attr(name));
  return std::vector<T>(array.data(), array.data() + array.size());
}

// A NumPy array with a copy of the data: `[rows]` for one column, else `[rows, columns]`.
template <class T>
nanobind::object to_numpy(const T* data, std::size_t rows, std::size_t columns) {
  T* memory = new T[std::max<std::size_t>(1, rows * columns)];
  if (rows * columns) std::memcpy(memory, data, rows * columns * sizeof(T));
  nanobind::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  const std::size_t shape[2] = {rows, columns};
  const std::size_t dimensions = columns == 1 ? 1 : 2;
  return nanobind::cast(nanobind::ndarray<nanobind::numpy, T>(memory, dimensions, shape, owner));
}

template <class T>
nanobind::object vector_to_numpy(const std::vector<T>& v) {
  return to_numpy(v.data(), v.size(), 1);
}
