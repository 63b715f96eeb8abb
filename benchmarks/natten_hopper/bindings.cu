// NATTEN's five entry points as torch operators, so that no Python headers are needed. libnatten.py calls them.
#include <torch/library.h>

#include <natten/hopper_fna.h>
#include <natten/token_permute.h>

namespace {

using Dims = std::tuple<int32_t, int32_t, int32_t>;

Dims dims(at::IntArrayRef values) {
  TORCH_CHECK(values.size() == 3, "expected three sizes, got ", values.size());
  return {static_cast<int32_t>(values[0]), static_cast<int32_t>(values[1]), static_cast<int32_t>(values[2])};
}

void hopper_na3d_forward(
    at::Tensor out,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& logsumexp,
    at::IntArrayRef kernel_size,
    at::IntArrayRef stride,
    at::IntArrayRef dilation,
    std::array<bool, 3> is_causal,
    double scale,
    at::IntArrayRef q_shape,
    at::IntArrayRef kv_shape,
    at::IntArrayRef qkv_shape,
    at::IntArrayRef query_tile_shape,
    at::IntArrayRef key_tile_shape,
    int64_t kernel_type) {
  natten::hopper_na3d_forward(
      out, query, key, value, logsumexp, dims(kernel_size), dims(stride), dims(dilation),
      {is_causal[0], is_causal[1], is_causal[2]}, static_cast<float>(scale), dims(q_shape), dims(kv_shape),
      dims(qkv_shape), dims(query_tile_shape), dims(key_tile_shape), static_cast<int>(kernel_type));
}

void token_permute_3d(
    at::Tensor out, const at::Tensor& in, at::IntArrayRef tile_shape, at::IntArrayRef dilation, bool flip_tiled_dims) {
  natten::token_permute_3d(out, in, dims(tile_shape), dims(dilation), flip_tiled_dims);
}

void token_unpermute_3d(
    at::Tensor out, const at::Tensor& in, at::IntArrayRef tile_shape, at::IntArrayRef dilation, bool flip_tiled_dims) {
  natten::token_unpermute_3d(out, in, dims(tile_shape), dims(dilation), flip_tiled_dims);
}

} // namespace

TORCH_LIBRARY(libnatten_hopper, m) {
  m.def("hopper_na3d_forward(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor(b!)? logsumexp, "
        "int[] kernel_size, int[] stride, int[] dilation, bool[3] is_causal, float scale, int[] q_shape, "
        "int[] kv_shape, int[] qkv_shape, int[] query_tile_shape, int[] key_tile_shape, int kernel_type) -> ()",
        &hopper_na3d_forward);
  m.def("token_permute_3d(Tensor(a!) out, Tensor input, int[] tile_shape, int[] dilation, bool flip_tiled_dims) -> ()",
        &token_permute_3d);
  m.def("token_unpermute_3d(Tensor(a!) out, Tensor input, int[] tile_shape, int[] dilation, bool flip_tiled_dims) -> ()",
        &token_unpermute_3d);
}
