/* The host side of the RoPE kernels: checks a call's tensors, chooses the kernel, launches it. Plain C against the tvm-ffi
 * C ABI and the CUDA driver, so that a C compiler builds it in half a second: neither nvcc nor the CUDA headers are needed,
 * and one library serves every configuration and device.
 *
 * Exported to tvm-ffi:
 *   rope_open(image address, bytes, head_dim, norm, per_head, fp16, table_f32, out_f32, exact_fp32, bhsd, shared) -> handle
 *   rope_load(handle, device)                     makes the kernels resident on a device, outside of any capture
 *   rope_launch(handle, stream, path, q, k|None, q_weight|None, k_weight|None, q_cos, q_sin, k_cos|None, k_sin|None,
 *               q_out, k_out|None, q_eps, k_eps, q_heads, k_heads) -> status
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
  if (cu_open()) return -1;
  if (!(c = calloc(1, sizeof *c))) return fail("MemoryError", "rope_open");
  c->head_dim = (int)a[2].v_int64, c->norm = (int)a[3].v_int64, c->per_head = (int)a[4].v_int64, c->fp16 = (int)a[5].v_int64;
  c->table_f32 = (int)a[6].v_int64, c->out_f32 = (int)a[7].v_int64, c->exact_fp32 = (int)a[8].v_int64;
  c->bhsd = (int)a[9].v_int64, c->shared = (int)a[10].v_int64, c->registers = LTX_USES_REGISTERS(c->head_dim, c->norm, c->per_head);
  code = cu.LibraryLoadData(&library, (const void*)(intptr_t)a[0].v_int64, NULL, NULL, 0, NULL, NULL, 0);
  if (code) {
    free(c);
    return cu_fail("cuLibraryLoadData", code);
  }
  for (i = 0; i < ENTRIES; ++i)
    if (cu.LibraryGetKernel(&c->kernels[i], library, kEntryNames[i])) c->kernels[i] = NULL;
  if (!c->kernels[ROW] || !c->kernels[ANY]) return fail("RuntimeError", "rope_open: the image has no rope kernels");
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = (int64_t)(intptr_t)c;
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

/* Fills one side. *vectors is cleared where the side forbids them. Returns -1 (raised) or a status. */
static int read_side(const Config* c, const DLTensor* x, const DLTensor* w, const DLTensor* cos, const DLTensor* sin,
                     const DLTensor* out, double eps, int64_t heads, LtxRopeSide* s, int* vectors) {
  const int64_t D = c->head_dim;
  int64_t batch, seq;
  int table_bytes = c->table_f32 ? 4 : 2, i, status = 0;
  if (!x || !cos || !sin || !out) return fail("ValueError", "rope kernel: x, cos, sin and out must be tensors");
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
      x->device.device_type != kDLCUDA || cos->device.device_type != kDLCUDA || sin->device.device_type != kDLCUDA ||
      (w && (w->device.device_type != kDLCUDA || w->device.device_id != x->device.device_id)))
    return fail("ValueError", "rope kernel: all tensors of a call must be on the same CUDA device");
  s->x = address(x), s->cos = address(cos), s->sin = address(sin), s->out = address(out), s->weight = NULL;
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

EXPORT int __tvm_ffi_rope_launch(void* self, const TVMFFIAny* a, int32_t n, TVMFFIAny* result) {
  LtxRopeParams p;
  Config* c;
  const DLTensor *q, *k, *k_cos, *k_sin;
  enum Entry entry;
  int path, status, vectors = 1, pushed, failed, device;
  (void)self;
  if (n != 17) return fail("ValueError", "rope_launch takes 17 arguments");
  c = (Config*)(intptr_t)a[0].v_int64, path = (int)a[2].v_int64;
  q = tensor(&a[3]), k = tensor(&a[4]);
  status = read_side(c, q, tensor(&a[5]), tensor(&a[7]), tensor(&a[8]), tensor(&a[11]), number(&a[13]), a[15].v_int64,
                     &p.side[0], &vectors);
  if (status == 0 && k) {
    k_cos = tensor(&a[9]), k_sin = tensor(&a[10]);
    if (!k_cos) k_cos = tensor(&a[7]), k_sin = tensor(&a[8]);
    if (k->device.device_id != q->device.device_id)
      return fail("ValueError", "rope kernel: q and k must be on the same CUDA device");
    status = read_side(c, k, tensor(&a[6]), k_cos, k_sin, tensor(&a[12]), number(&a[14]), a[16].v_int64, &p.side[1],
                       &vectors);
  } else {
    memset(&p.side[1], 0, sizeof p.side[1]);
  }
  if (status < 0) return -1;
  if (status == 0 && c->shared &&
      (!k || tensor(&a[9]) || p.side[0].seq != p.side[1].seq || p.side[0].batch != p.side[1].batch ||
       p.side[0].heads != p.side[1].heads))
    return fail("ValueError", "rope kernel: q and k that share cos and sin must have the same batch, length and heads");
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = status;
  if (status) return 0;

  if (!vectors || path == PATH_ANY) {
    entry = ANY;
  } else {
    int pair = c->kernels[PAIR] && path != PATH_ROW;
    if (pair && path == PATH_AUTO && !c->per_head)
      pair = (int64_t)p.side[0].seq * p.side[0].batch * c->norm >= PAIR_MIN_ELEMENTS;
    entry = pair ? PAIR : ROW;
  }
  if (path == PATH_DRY) return 0;
  device = q->device.device_id;
  if (enter(device, &pushed)) return -1;
  failed = make_resident(c, device) || launch(c, entry, device, (Handle)(intptr_t)a[1].v_int64, &p);
  leave(pushed);
  return failed ? -1 : 0;
}
