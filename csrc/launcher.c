/* The host side of the RoPE kernels: checks a call's tensors, chooses the kernel, launches it. Plain C against the tvm-ffi
 * C ABI and the CUDA driver, so that a C compiler builds it in half a second: neither nvcc nor the CUDA headers are needed,
 * and one library serves every configuration and device. torch_dispatch.h makes the same launch the ops' CUDA kernel.
 *
 * Exported to tvm-ffi:
 *   rope_open(image address, bytes, head_dim, norm, per_head, fp16, table_f32, out_f32, exact_fp32, bhsd, shared) -> handle
 *   rope_load(handle, device)                     makes the kernels resident on a device, outside of any capture
 *   rope_launch(handle, stream, path, q, k|None, q_weight|None, k_weight|None, q_cos, q_sin, k_cos|None, k_sin|None,
 *               q_out, k_out|None, q_eps, k_eps, q_heads, k_heads) -> status
 *   rope_serve(handle, device, contract address)  from now on the ops' own kernel launches it too (torch_dispatch.h)
 *   rope_unserve(handle)                          and from now on not any more
 *   rope_counted() -> address of what was launched that way: {calls, bytes} of one side, and of two
 *   rope_register(namespace address, key address, tuple address) -> 1 if it now is the ops' kernel
 * status: 0 launched; 1 run the reference: eager would sum in another order (contiguous x or weight off a multiple of 4
 * elements), or eps is so small that the kernel's division could show; 2 copy the weights to aligned, contiguous memory and call again. Bad arguments raise ValueError. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#include "rope_params.h"
#include "rope_plan.h"

/* ---- the CUDA driver: the few calls needed, declared here (the ABI of libcuda.so.1 is stable) ---------------------- */
typedef void* Handle;
static struct {
  int (*LibraryLoadData)(Handle*, const void*, int*, void**, unsigned, int*, void**, unsigned);
  int (*LibraryGetKernel)(Handle*, Handle, const char*);
  int (*KernelGetFunction)(Handle*, Handle);
  int (*LaunchKernel)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**);
  int (*CtxGetCurrent)(Handle*);
  int (*CtxPushCurrent)(Handle);
  int (*CtxPopCurrent)(Handle*);
  int (*DeviceGet)(int*, int);
  int (*DevicePrimaryCtxRetain)(Handle*, int);
  int (*ThreadExchangeStreamCaptureMode)(int*);
  int (*GetErrorString)(int, const char**);
} cu;
static int cu_ready;

static int fail(const char* kind, const char* message) {
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

static int cu_open(void) {
  static const char* const names[] = {"cuLibraryLoadData",    "cuLibraryGetKernel", "cuKernelGetFunction",
                                      "cuLaunchKernel",       "cuCtxGetCurrent",    "cuCtxPushCurrent_v2",
                                      "cuCtxPopCurrent_v2",   "cuDeviceGet",        "cuDevicePrimaryCtxRetain",
                                      "cuThreadExchangeStreamCaptureMode", "cuGetErrorString"};
  Handle lib;
  size_t i;
  if (__atomic_load_n(&cu_ready, __ATOMIC_ACQUIRE)) return 0;
  lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib) return fail("RuntimeError", "libcuda.so.1 cannot be loaded: this process has no CUDA driver");
  for (i = 0; i < sizeof names / sizeof *names; ++i) {
    void* f = dlsym(lib, names[i]);
    if (!f) return fail("RuntimeError", "the CUDA driver is too old: the kernels need CUDA 12.0 or newer (cuLibraryLoadData)");
    memcpy((char*)&cu + i * sizeof(void*), &f, sizeof f);
  }
  __atomic_store_n(&cu_ready, 1, __ATOMIC_RELEASE);
  return 0;
}

static int cu_fail(const char* what, int code) {
  const char* text = NULL;
  char message[256];
  cu.GetErrorString(code, &text);
  snprintf(message, sizeof message, "rope kernel: %s failed with CUDA error %d (%s)", what, code, text ? text : "unknown");
  return fail("RuntimeError", message);
}

/* ---- a loaded configuration ---------------------------------------------------------------------------------------- */
enum Entry { PAIR, ROW, ANY, ENTRIES };
static const char* const kEntryNames[ENTRIES] = {"rope_pair", "rope_row", "rope_any"};
/* What tests and benchmarks may force; DRY does everything but the launch. */
enum Path { PATH_DRY = -1, PATH_AUTO, PATH_PAIR, PATH_ROW, PATH_ANY };
#define MAX_DEVICES 64

/* In calls of fewer elements a CTA per row is done sooner than a CTA per token (measured: benchmarks/NOTES.md). */
#define PAIR_MIN_ELEMENTS (3 << 19)

typedef struct {
  int head_dim, norm, per_head, fp16, table_f32, out_f32, exact_fp32, bhsd, shared;
  int registers; /* the row kernels are rope_row_registers */
  int device_type; /* kDLCUDA; kDLCPU: opened without an image, so that its launches can be looked at without a GPU */
  Handle kernels[ENTRIES]; /* NULL: not part of this configuration */
  Handle functions[MAX_DEVICES][ENTRIES];
  int resident[MAX_DEVICES];
} Config;
static Handle primary[MAX_DEVICES];

/* Makes `device` current if it is not; *pushed says whether it has to be undone. */
static int enter(int device, int* pushed) {
  Handle current = NULL, context = NULL;
  int code, ordinal;
  *pushed = 0;
  if (device < 0 || device >= MAX_DEVICES) return fail("ValueError", "rope kernel: device index out of range");
  context = __atomic_load_n(&primary[device], __ATOMIC_ACQUIRE);
  if (!context) {
    if ((code = cu.DeviceGet(&ordinal, device))) return cu_fail("cuDeviceGet", code);
    if ((code = cu.DevicePrimaryCtxRetain(&context, ordinal))) return cu_fail("cuDevicePrimaryCtxRetain", code);
    __atomic_store_n(&primary[device], context, __ATOMIC_RELEASE);
  }
  if ((code = cu.CtxGetCurrent(&current))) return cu_fail("cuCtxGetCurrent", code);
  if (current == context) return 0;
  if ((code = cu.CtxPushCurrent(context))) return cu_fail("cuCtxPushCurrent", code);
  *pushed = 1;
  return 0;
}
static void leave(int pushed) {
  Handle ignored;
  if (pushed) cu.CtxPopCurrent(&ignored);
}

/* The context of `device` is current. Loading is not allowed while a stream of this thread captures in the default mode. */
static int make_resident(Config* c, int device) {
  int i, code = 0, mode = 2; /* CU_STREAM_CAPTURE_MODE_RELAXED */
  if (__atomic_load_n(&c->resident[device], __ATOMIC_ACQUIRE)) return 0;
  cu.ThreadExchangeStreamCaptureMode(&mode);
  for (i = 0; i < ENTRIES && !code; ++i)
    if (c->kernels[i]) code = cu.KernelGetFunction(&c->functions[device][i], c->kernels[i]);
  cu.ThreadExchangeStreamCaptureMode(&mode);
  if (code) return cu_fail("cuKernelGetFunction", code);
  __atomic_store_n(&c->resident[device], 1, __ATOMIC_RELEASE);
  return 0;
}

#define EXPORT __attribute__((visibility("default")))

EXPORT int __tvm_ffi_rope_open(void* self, const TVMFFIAny* a, int32_t n, TVMFFIAny* result) {
  Config* c;
  Handle library;
  int i, code;
  (void)self;
  if (n != 11) return fail("ValueError", "rope_open takes 11 arguments");
  if (!(c = calloc(1, sizeof *c))) return fail("MemoryError", "rope_open");
  c->head_dim = (int)a[2].v_int64, c->norm = (int)a[3].v_int64, c->per_head = (int)a[4].v_int64, c->fp16 = (int)a[5].v_int64;
  c->table_f32 = (int)a[6].v_int64, c->out_f32 = (int)a[7].v_int64, c->exact_fp32 = (int)a[8].v_int64;
  c->bhsd = (int)a[9].v_int64, c->shared = (int)a[10].v_int64, c->registers = LTX_USES_REGISTERS(c->head_dim, c->norm, c->per_head);
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = (int64_t)(intptr_t)c;
  c->device_type = a[1].v_int64 ? kDLCUDA : kDLCPU;
  if (c->device_type == kDLCPU) return 0;
  if (cu_open()) {
    free(c);
    return -1;
  }
  code = cu.LibraryLoadData(&library, (const void*)(intptr_t)a[0].v_int64, NULL, NULL, 0, NULL, NULL, 0);
  if (code) {
    free(c);
    return cu_fail("cuLibraryLoadData", code);
  }
  for (i = 0; i < ENTRIES; ++i)
    if (cu.LibraryGetKernel(&c->kernels[i], library, kEntryNames[i])) c->kernels[i] = NULL;
  if (!c->kernels[ROW] || !c->kernels[ANY]) return fail("RuntimeError", "rope_open: the image has no rope kernels");
  return 0; /* lives as long as the process: graphs and captured launches refer to it */
}

EXPORT int __tvm_ffi_rope_load(void* self, const TVMFFIAny* a, int32_t n, TVMFFIAny* result) {
  int pushed, failed, device;
  (void)self;
  if (n != 2) return fail("ValueError", "rope_load takes a handle and a device index");
  device = (int)a[1].v_int64;
  if (enter(device, &pushed)) return -1;
  failed = make_resident((Config*)(intptr_t)a[0].v_int64, device);
  leave(pushed);
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = 0;
  return failed;
}

/* ---- reading the tensors of a call ---------------------------------------------------------------------------------- */
static const DLTensor* tensor(const TVMFFIAny* a) {
  if (a->type_index == kTVMFFIDLTensorPtr) return (const DLTensor*)a->v_ptr;
  if (a->type_index == kTVMFFITensor) return (const DLTensor*)(a->v_obj + 1); /* follows the header */
  return NULL;
}
static char* address(const DLTensor* t) { return (char*)t->data + t->byte_offset; }
static double number(const TVMFFIAny* a) { return a->type_index == kTVMFFIFloat ? a->v_float64 : (double)a->v_int64; }

/* 0 for a dimension of size 1: it is never stepped along, and torch may leave any stride there. */
static int64_t stride(const DLTensor* t, int dim) {
  int64_t s = 1;
  int i;
  if (t->shape[dim] == 1) return 0;
  if (t->strides) return t->strides[dim];
  for (i = dim + 1; i < t->ndim; ++i) s *= t->shape[i];
  return s;
}
static int contiguous(const DLTensor* t) {
  int64_t expected = 1;
  int i;
  for (i = t->ndim - 1; i >= 0; --i) {
    if (t->shape[i] != 1 && stride(t, i) != expected) return 0;
    expected *= t->shape[i];
  }
  return 1;
}
static int is_16(const Config* c, const DLTensor* t) {
  return t->dtype.bits == 16 && t->dtype.lanes == 1 && t->dtype.code == (c->fp16 ? kDLFloat : kDLBfloat);
}
static int is_table(const Config* c, const DLTensor* t) {
  return c->table_f32 ? t->dtype.bits == 32 && t->dtype.code == kDLFloat && t->dtype.lanes == 1 : is_16(c, t);
}
static int off_by(const void* p, int64_t a, int64_t b, int64_t c, int bytes) { /* no vector of 4 elements can be read */
  return ((uintptr_t)p % (4 * bytes)) != 0 || ((a | b | c) & 3) != 0;
}

/* Fills one side, all but `out`. *vectors is cleared where the side forbids them. Returns -1 (raised) or a status. */
static int read_side(const Config* c, const DLTensor* x, const DLTensor* w, const DLTensor* cos, const DLTensor* sin,
                     double eps, int64_t heads, LtxRopeSide* s, int* vectors) {
  const int64_t D = c->head_dim;
  int64_t batch, seq;
  int table_bytes = c->table_f32 ? 4 : 2, i, status = 0;
  if (!x || !cos || !sin) return fail("ValueError", "rope kernel: x, cos and sin must be tensors");
  if (x->ndim != (c->per_head ? 4 : 3) || !is_16(c, x))
    return fail("ValueError", "rope kernel: x must be [B, S, N] (norm over the row) or [B, S, H, D] (per head), of the dtype it was prepared for");
  batch = x->shape[0], seq = x->shape[1];
  if (c->per_head ? x->shape[2] != heads || x->shape[3] != D : x->shape[2] != c->norm || heads * D != c->norm)
    return fail("ValueError", "rope kernel: num_heads * head_dim of x differs from what was prepared");
  for (i = 0; i < 2; ++i) {
    const DLTensor* t = i ? sin : cos;
    if (t->ndim != 4 || !is_table(c, t) || (t->shape[0] != batch && t->shape[0] != 1) ||
        (t->shape[1] != heads && t->shape[1] != 1) || t->shape[2] != seq || t->shape[3] != D / 2)
      return fail("ValueError", "rope kernel: cos and sin must be [B or 1, H or 1, S, D/2] of the dtype that was prepared");
  }
  if (batch > 0x7fffffff || seq > 0x7ffffff0 || heads > 0x7fffffff || (c->per_head && seq * heads > 0x7fff0000))
    return fail("ValueError", "rope kernel: a dimension of x exceeds 2^31");
  if (x->device.device_id != cos->device.device_id || x->device.device_id != sin->device.device_id ||
      (int)x->device.device_type != c->device_type || (int)cos->device.device_type != c->device_type ||
      (int)sin->device.device_type != c->device_type ||
      (w && ((int)w->device.device_type != c->device_type || w->device.device_id != x->device.device_id)))
    return fail("ValueError", "rope kernel: all tensors of a call must be on the same CUDA device");
  s->x = address(x), s->cos = address(cos), s->sin = address(sin), s->out = NULL, s->weight = NULL;
  s->batch = (int)batch, s->seq = batch ? (int)seq : 0, s->heads = (int)heads, s->eps = (float)eps;
  s->x_b = stride(x, 0), s->x_s = stride(x, 1), s->x_e = stride(x, x->ndim - 1);
  s->x_h = c->per_head ? stride(x, 2) : D * s->x_e;
  s->cos_b = stride(cos, 0), s->cos_h = stride(cos, 1), s->cos_s = stride(cos, 2), s->cos_e = stride(cos, 3);
  s->sin_b = stride(sin, 0), s->sin_h = stride(sin, 1), s->sin_s = stride(sin, 2), s->sin_e = stride(sin, 3);
  s->out_b = seq * heads * D, s->out_s = c->bhsd ? D : heads * D, s->out_h = c->bhsd ? seq * D : D;
  if (s->seq == 0) return 0;

  if ((c->norm & (c->norm - 1)) && !(s->eps >= 1e-30f)) return 1; /* mean_of in rope_math.cuh */
  /* torch's vectorised rms_norm reads x and weight as they are only if they are aligned; otherwise it sums in another order.
   * A copy that eager makes (x or weight not contiguous; .float() in the fp32 contracts) is aligned. */
  if (!c->exact_fp32 && contiguous(x) && (uintptr_t)s->x % 8) return 1;
  if (w) {
    if (w->ndim != 1 || w->shape[0] != c->norm || !is_16(c, w))
      return fail("ValueError", "rope kernel: weight must be [N] (or [D] for a norm per head), of x's dtype");
    s->weight = address(w);
    if (!contiguous(w)) status = 2;
    else if ((uintptr_t)s->weight % 8) status = c->exact_fp32 ? 2 : 1;
    if (status) return status;
  }
  if (s->x_e != 1 || off_by(s->x, s->x_b, s->x_s, c->per_head ? s->x_h : 0, 2) || s->cos_e != 1 || s->sin_e != 1 ||
      s->cos_b != s->sin_b || s->cos_h != s->sin_h || s->cos_s != s->sin_s ||
      off_by(s->cos, s->cos_b, s->cos_h, s->cos_s, table_bytes) || (uintptr_t)s->sin % (4 * table_bytes))
    *vectors = 0;
  return 0;
}

static int launch(const Config* c, enum Entry entry, int device, Handle stream, LtxRopeParams* p) {
  const LtxRopeSide whole[2] = {p->side[0], p->side[1]};
  const int pair = entry == PAIR, table_bytes = c->table_f32 ? 4 : 2, out_bytes = c->out_f32 ? 4 : 2;
  int most = whole[0].batch > whole[1].batch ? whole[0].batch : whole[1].batch, b0, i, code;
  int64_t blocks = 0;
  unsigned threads = (c->registers && entry != ANY ? LTX_REGISTER_THREADS : LTX_STAGED_THREADS) * (pair ? 2 : 1);
  if (c->per_head) {
    threads = LTX_HEAD_THREADS;
    for (i = 0; i < (pair ? 1 : 2); ++i) blocks += LTX_HEAD_BLOCKS((int64_t)whole[i].seq, whole[i].heads, c->head_dim);
  } else {
    blocks = pair ? whole[0].seq : (int64_t)whole[0].seq + whole[1].seq;
  }
  if (blocks == 0) return 0;
  if (blocks > 0x7fffffff) return fail("ValueError", "rope kernel: more than 2^31 rows in one call");
  for (b0 = 0; b0 < most; b0 += 65535) { /* gridDim.y ends at 65535 */
    void* args[1];
    args[0] = p;
    for (i = 0; i < 2; ++i) {
      LtxRopeSide* s = &p->side[i];
      const LtxRopeSide* f = &whole[i];
      s->batch = f->batch > b0 ? f->batch - b0 : 0;
      if (!b0) continue;
      s->x = (const char*)f->x + b0 * f->x_b * 2;
      s->cos = (const char*)f->cos + b0 * f->cos_b * table_bytes;
      s->sin = (const char*)f->sin + b0 * f->sin_b * table_bytes;
      s->out = (char*)f->out + b0 * f->out_b * out_bytes;
    }
    code = cu.LaunchKernel(c->functions[device][entry], (unsigned)blocks, most - b0 < 65535 ? most - b0 : 65535, 1, threads, 1, 1, 0,
                           stream, args, NULL);
    if (code) return cu_fail("cuLaunchKernel", code);
  }
  return 0;
}

/* One call of either op: what was passed, and what becomes of it. */
typedef struct {
  const DLTensor *q, *k, *q_weight, *k_weight, *q_cos, *q_sin, *k_cos, *k_sin; /* k NULL: a single tensor; k_cos NULL: q's */
  double q_eps, k_eps;
  int64_t q_heads, k_heads;
  LtxRopeParams params;
  int vectors; /* every address and stride allows loads of 4 elements */
} Call;

/* Checks a call and fills its params, all but the outputs. Returns -1 (raised) or a status. */
static int read_call(const Config* c, Call* a) {
  LtxRopeSide *q = &a->params.side[0], *k = &a->params.side[1];
  int status;
  a->vectors = 1;
  status = read_side(c, a->q, a->q_weight, a->q_cos, a->q_sin, a->q_eps, a->q_heads, q, &a->vectors);
  if (status == 0 && a->k) {
    if (a->k->device.device_id != a->q->device.device_id)
      return fail("ValueError", "rope kernel: q and k must be on the same CUDA device");
    status = read_side(c, a->k, a->k_weight, a->k_cos ? a->k_cos : a->q_cos, a->k_cos ? a->k_sin : a->q_sin, a->k_eps,
                       a->k_heads, k, &a->vectors);
  } else {
    memset(k, 0, sizeof *k);
  }
  if (status == 0 && c->shared && (!a->k || a->k_cos || q->seq != k->seq || q->batch != k->batch || q->heads != k->heads))
    return fail("ValueError", "rope kernel: q and k that share cos and sin must have the same batch, length and heads");
  return status;
}

static enum Entry choose(const Config* c, const Call* a, int path) {
  const LtxRopeSide* q = &a->params.side[0];
  if (!a->vectors || path == PATH_ANY) return ANY;
  if (!c->kernels[PAIR] || path == PATH_ROW) return ROW;
  if (path == PATH_AUTO && !c->per_head && (int64_t)q->seq * q->batch * c->norm < PAIR_MIN_ELEMENTS) return ROW;
  return PAIR;
}

/* The outputs are in place. Returns 0, or -1 (raised). */
static int start(Config* c, Call* a, int path, Handle stream) {
  const int device = a->q->device.device_id;
  int pushed, failed;
  if (enter(device, &pushed)) return -1;
  failed = make_resident(c, device) || launch(c, choose(c, a, path), device, stream, &a->params);
  leave(pushed);
  return failed ? -1 : 0;
}

EXPORT int __tvm_ffi_rope_launch(void* self, const TVMFFIAny* a, int32_t n, TVMFFIAny* result) {
  Call call;
  Config* c;
  const DLTensor *q_out, *k_out;
  int path, status;
  (void)self;
  if (n != 17) return fail("ValueError", "rope_launch takes 17 arguments");
  c = (Config*)(intptr_t)a[0].v_int64, path = (int)a[2].v_int64;
  call.q = tensor(&a[3]), call.k = tensor(&a[4]), call.q_weight = tensor(&a[5]), call.k_weight = tensor(&a[6]);
  call.q_cos = tensor(&a[7]), call.q_sin = tensor(&a[8]), call.k_cos = tensor(&a[9]), call.k_sin = tensor(&a[10]);
  q_out = tensor(&a[11]), k_out = tensor(&a[12]);
  call.q_eps = number(&a[13]), call.k_eps = number(&a[14]), call.q_heads = a[15].v_int64, call.k_heads = a[16].v_int64;
  status = read_call(c, &call);
  if (status < 0) return -1;
  if (!q_out || (call.k && !k_out)) return fail("ValueError", "rope kernel: the outputs must be tensors");
  call.params.side[0].out = address(q_out), call.params.side[1].out = call.k ? address(k_out) : NULL;
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = status;
  return status || path == PATH_DRY ? 0 : start(c, &call, path, (Handle)(intptr_t)a[1].v_int64);
}

#include "torch_dispatch.h"
#include "python_call.h"
