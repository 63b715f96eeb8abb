/* The ops' CUDA kernel, as torch's dispatcher calls it: a C function instead of one in Python, which costs the host 6 us
 * a call. The second half of launcher.c.
 *
 * It is registered through torch's stable C ABI (torch/csrc/stable/c/shim.h, inductor/aoti_torch/c/shim.h), whose symbols
 * are looked up in the process: neither torch's headers nor one torch version is built in. kTorchAbi says whose layout of
 * arguments is meant, and later versions of torch keep to it.
 *
 *   stack in    one 64-bit word an argument: Tensor: a handle; Tensor?: 0 or a pointer to a word that holds one; float: its
 *               bits; int: itself; str: a handle. The callee owns all of them.
 *   stack out   handles of the results, from the first word on, owned by the caller
 *
 * A call that fits a configuration in `served` is launched here. Any other one, and whatever goes wrong, takes the slow
 * op, in Python, with the stack as it came: it decides, builds nothing, runs the reference or raises. */

enum { kTorchAbiMajor = 2, kTorchAbiMinor = 11 }; /* the first version that is supported */
static const uint64_t kTorchAbi = ((uint64_t)kTorchAbiMajor << 56) | ((uint64_t)kTorchAbiMinor << 48);
typedef uint64_t Word;
typedef void* Tensor;
typedef struct {
  void* words[3]; /* of a std::vector; only ever passed back */
} Vector;

static struct {
  int (*library_init_impl)(const char*, const char*, const char*, uint32_t, Handle*);
  int (*library_impl)(Handle, const char*, void (*)(Word*, uint64_t, uint64_t), uint64_t);
  int (*delete_library)(Handle);
  int (*call_dispatcher)(const char*, const char*, Word*, uint64_t);
  void (*check)(_Bool, const char*, const char*, uint32_t, const char*);
  int (*get_dim)(Tensor, int64_t*);
  int (*get_sizes)(Tensor, int64_t**);
  int (*get_strides)(Tensor, int64_t**);
  int (*get_dtype)(Tensor, int32_t*);
  int (*get_device_type)(Tensor, int32_t*);
  int (*get_device_index)(Tensor, int32_t*);
  int (*get_const_data_ptr)(Tensor, const void**);
  int (*get_data_ptr)(Tensor, void**);
  int (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*);
  int (*delete_tensor)(Tensor);
  int (*string_c_str)(Handle, const char**);
  int (*delete_string)(Handle);
  int32_t (*dtype_bf16)(void);
  int32_t (*dtype_fp16)(void);
  int32_t (*dtype_fp32)(void);
  int32_t (*device_type_cuda)(void);
  Vector (*unpack_longs)(void*); /* THPUtils_unpackLongs: how a Python exception is thrown, see throw_python_error */
  /* CPython */
  int (*gil_ensure)(void);
  void (*gil_release)(int);
  Handle (*this_thread)(void);
  Handle (*type_of)(Handle);
  void (*set_error)(Handle, Handle);
  void (*decref)(Handle);
  /* below: may be missing */
  int (*current_stream)(int32_t, Handle*); /* CUDA builds only */
  int (*delete_optional)(Word*);           /* from 2.13; before, `operator delete` */
  void (*operator_delete)(void*);
} torch;
static const char* const kTorchNames[] = {
    "aoti_torch_library_init_impl", "torch_library_impl", "aoti_torch_delete_library_object", "torch_call_dispatcher",
    "aoti_torch_check", "aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_strides", "aoti_torch_get_dtype",
    "aoti_torch_get_device_type", "aoti_torch_get_device_index", "torch_get_const_data_ptr", "aoti_torch_get_data_ptr",
    "aoti_torch_empty_strided", "aoti_torch_delete_tensor_object", "torch_string_c_str", "torch_delete_string",
    "aoti_torch_dtype_bfloat16", "aoti_torch_dtype_float16", "aoti_torch_dtype_float32", "aoti_torch_device_type_cuda",
    "_Z20THPUtils_unpackLongsP7_object", "PyGILState_Ensure", "PyGILState_Release", "PyGILState_GetThisThreadState",
    "PyObject_Type", "PyErr_SetObject", "Py_DecRef", "aoti_torch_get_current_cuda_stream", "torch_delete_stable_ivalue",
    "_ZdlPv"};
#define TORCH_REQUIRED 28
static int32_t dtype_bf16, dtype_fp16, dtype_fp32, device_type_cuda;
static void* minus_one; /* the Python tuple (-1,) */

/* ---- the configurations that may be launched from here -------------------------------------------------------------- */
typedef struct Served {
  struct Served* next;
  Config* config;
  int device; /* -1: CPU */
  char contract[40];
} Served;
static Served* served; /* only ever prepended to, by one thread at a time: read without a lock */

EXPORT int __tvm_ffi_rope_serve(void* self, const TVMFFIAny* a, int32_t n, TVMFFIAny* result) {
  const char* contract;
  Served* entry;
  (void)self;
  if (n != 3) return fail("ValueError", "rope_serve takes a handle, a device index and a contract");
  contract = (const char*)(intptr_t)a[2].v_int64;
  if (strlen(contract) >= sizeof entry->contract) return fail("ValueError", "rope_serve: the contract's name is too long");
  if (!(entry = calloc(1, sizeof *entry))) return fail("MemoryError", "rope_serve");
  entry->config = (Config*)(intptr_t)a[0].v_int64, entry->device = (int)a[1].v_int64;
  strcpy(entry->contract, contract);
  entry->next = __atomic_load_n(&served, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&served, &entry->next, entry, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = 0;
  return 0;
}

/* From now on the configuration is not launched from here any more. */
EXPORT int __tvm_ffi_rope_unserve(void* self, const TVMFFIAny* a, int32_t n, TVMFFIAny* result) {
  Served* s;
  (void)self;
  if (n != 1) return fail("ValueError", "rope_unserve takes a handle");
  for (s = __atomic_load_n(&served, __ATOMIC_ACQUIRE); s; s = s->next)
    if (s->config == (Config*)(intptr_t)a[0].v_int64) __atomic_store_n(&s->device, -2, __ATOMIC_RELEASE);
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = 0;
  return 0;
}

static Config* find(const Call* a, const char* contract, int bhsd) {
  const int device = a->q->device.device_type == kDLCUDA ? a->q->device.device_id : -1;
  const int per_head = a->q->ndim == 4, shared = a->k && !a->k_cos && a->q_heads == a->k_heads;
  const Served* s;
  if (a->q->ndim < 3 || a->q_cos->ndim != 4) return NULL;
  if (a->k && (a->k->ndim != a->q->ndim || a->k->shape[a->k->ndim - 1] != a->q->shape[a->q->ndim - 1])) return NULL;
  for (s = __atomic_load_n(&served, __ATOMIC_ACQUIRE); s; s = s->next) {
    const Config* c = s->config;
    if (s->device == device && c->norm == a->q->shape[a->q->ndim - 1] && c->head_dim == 2 * a->q_cos->shape[3] &&
        c->per_head == per_head && c->shared == shared && c->bhsd == bhsd && is_16(c, a->q) && is_table(c, a->q_cos) &&
        strcmp(s->contract, contract) == 0)
      return s->config;
  }
  return NULL;
}

/* ---- arguments ------------------------------------------------------------------------------------------------------- */
enum { MAX_TENSORS = 8 };
typedef struct {
  DLTensor view;
  Tensor handle;
} Argument;

/* Describes the tensor behind a handle. Its shape and strides are torch's own: valid while the handle is. */
static int describe(Tensor t, DLTensor* v) {
  int64_t dim = 0;
  int32_t dtype = 0, type = 0, index = 0;
  const void* data = NULL;
  if (torch.get_dim(t, &dim) || torch.get_sizes(t, &v->shape) || torch.get_strides(t, &v->strides) ||
      torch.get_dtype(t, &dtype) || torch.get_device_type(t, &type) || torch.get_device_index(t, &index) ||
      torch.get_const_data_ptr(t, &data))
    return -1;
  v->data = (void*)data, v->byte_offset = 0, v->ndim = (int32_t)dim;
  v->dtype.lanes = 1, v->dtype.bits = dtype == dtype_fp32 ? 32 : 16;
  v->dtype.code = dtype == dtype_bf16 ? kDLBfloat : dtype == dtype_fp16 || dtype == dtype_fp32 ? kDLFloat : kDLOpaqueHandle;
  v->device.device_type = type == device_type_cuda ? kDLCUDA : kDLCPU;
  v->device.device_id = type == device_type_cuda ? index : 0;
  return 0;
}

/* Reads `count` tensors from the stack; bit i of `optional`: the i-th may be None, and then is NULL. */
static int read_tensors(const Word* stack, int count, unsigned optional, Argument* arguments, const DLTensor** found) {
  int i;
  for (i = 0; i < count; ++i) {
    const Word word = stack[i];
    found[i] = NULL;
    if ((optional >> i & 1) && !word) continue;
    arguments[i].handle = (Tensor)(uintptr_t)(optional >> i & 1 ? *(const Word*)(uintptr_t)word : word);
    if (describe(arguments[i].handle, &arguments[i].view)) return -1;
    found[i] = &arguments[i].view;
  }
  return 0;
}

static double to_double(Word word) {
  double value;
  memcpy(&value, &word, sizeof value);
  return value;
}

static void free_arguments(Word* stack, int count, unsigned optional, Word contract, Word layout) {
  int i;
  for (i = 0; i < count; ++i) {
    Word* box = (Word*)(uintptr_t)stack[i];
    if (!(optional >> i & 1)) {
      torch.delete_tensor((Tensor)box);
    } else if (box) {
      torch.delete_tensor((Tensor)(uintptr_t)*box);
      if (torch.delete_optional) torch.delete_optional(box);
      else torch.operator_delete(box);
    }
  }
  torch.delete_string((Handle)(uintptr_t)contract);
  torch.delete_string((Handle)(uintptr_t)layout);
}

/* A new output for x: [B, S, heads * D], [B, S, heads, D] or [B, heads, S, D], contiguous. */
static Tensor allocate(const Config* c, const DLTensor* x, int64_t heads) {
  const int64_t b = x->shape[0], s = x->shape[1], d = c->head_dim;
  int64_t sizes[4] = {b, s, heads, d}, strides[4] = {1, 1, 1, 1};
  const int cuda = x->device.device_type == kDLCUDA;
  int dim = 4, i;
  Tensor out = NULL;
  if (c->bhsd) sizes[1] = heads, sizes[2] = s;
  else if (!c->per_head) sizes[2] = heads * d, dim = 3;
  for (i = dim - 2; i >= 0; --i) strides[i] = strides[i + 1] * (sizes[i + 1] > 1 ? sizes[i + 1] : 1);
  if (torch.empty_strided(dim, sizes, strides, c->out_f32 ? dtype_fp32 : c->fp16 ? dtype_fp16 : dtype_bf16,
                          cuda ? device_type_cuda : 0, x->device.device_id, &out))
    return NULL;
  return out;
}

/* What the last launch would have been, of a configuration without kernels. Read by tests. */
static struct {
  LtxRopeParams params;
  int64_t vectors, calls;
} recorded;
static void record(const Call* a) { recorded.params = a->params, recorded.vectors = a->vectors, ++recorded.calls; }

/* What was launched from here, of one side and of two: calls, and bytes of the tensors read and written, each element
 * once. Read by kernels/counts.py. */
static struct {
  int64_t calls, bytes;
} counted[2];

static int64_t bytes_of(const DLTensor* t) {
  int64_t n = t ? t->dtype.bits / 8 : 0;
  int i;
  for (i = 0; t && i < t->ndim; ++i) n *= t->strides && !t->strides[i] ? 1 : t->shape[i];
  return n;
}

static void tally(const Config* c, const Call* a) {
  const DLTensor* const inputs[] = {a->q, a->q_weight, a->q_cos, a->q_sin, a->k, a->k_weight, a->k_cos, a->k_sin};
  int64_t bytes = (c->out_f32 ? 2 : 1) * (bytes_of(a->q) + bytes_of(a->k)); /* the outputs */
  size_t i;
  for (i = 0; i < sizeof inputs / sizeof *inputs; ++i) bytes += bytes_of(inputs[i]);
  __atomic_fetch_add(&counted[a->k != NULL].calls, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&counted[a->k != NULL].bytes, bytes, __ATOMIC_RELAXED);
}

EXPORT int __tvm_ffi_rope_counted(void* self, const TVMFFIAny* a, int32_t n, TVMFFIAny* result) {
  (void)self, (void)a, (void)n;
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = (int64_t)(intptr_t)&counted;
  return 0;
}

/* The outputs of a call, launched; 0 where it was not, and out then holds nothing. */
static int serve(Call* a, const char* contract, const char* layout, Tensor* out) {
  const int bhsd = strcmp(layout, "bhsd") == 0, sides = a->k ? 2 : 1;
  Config* c;
  Handle stream = NULL;
  int i, ready = 1;
  if (!bhsd && strcmp(layout, "bshd") != 0) return 0;
  if ((a->k_cos == NULL) != (a->k_sin == NULL) || !(c = find(a, contract, bhsd)) || read_call(c, a) != 0) return 0;
  for (i = 0; i < sides && ready; ++i) {
    void* data = NULL;
    out[i] = allocate(c, i ? a->k : a->q, i ? a->k_heads : a->q_heads);
    ready = out[i] && !torch.get_data_ptr(out[i], &data);
    a->params.side[i].out = data;
  }
  if (ready && c->device_type == kDLCPU) {
    record(a);
    tally(c, a);
    return 1;
  }
  ready = ready && !torch.current_stream(a->q->device.device_id, &stream) && !start(c, a, PATH_AUTO, stream);
  for (i = 0; i < sides && !ready; ++i)
    if (out[i]) torch.delete_tensor(out[i]), out[i] = NULL;
  if (ready) tally(c, a);
  return ready;
}

/* ---- the slow op ------------------------------------------------------------------------------------------------------ */
static void release_gil(int* state) { torch.gil_release(*state); }

/* Throws the Python exception `error` (owned) as torch's C++ code does, so that it reaches the caller as it was raised.
 * C has no throw, and the ABI's own one (aoti_torch_check) makes a RuntimeError of everything. But THPUtils_unpackLongs
 * throws torch's python_error when it unpacks a -1 while an exception is set. Should it ever stop to, a RuntimeError is
 * still raised. The stack unwinds through these frames: hence -fexceptions and the cleanup. */
static void throw_python_error(Word error) {
  if (torch.this_thread()) { /* on a thread that Python does not know, the exception would go with the thread's state */
    int gil __attribute__((cleanup(release_gil))) = torch.gil_ensure();
    const Handle value = (Handle)(uintptr_t)error, type = torch.type_of(value);
    torch.set_error(type, value);
    torch.decref(type);
    torch.decref(value);
    torch.unpack_longs(minus_one);
  }
  torch.check(0, "throw_python_error", "torch_dispatch.h", __LINE__, "ltx_inductor: the op failed; its exception is lost");
}

/* Runs the slow op on the stack, which it consumes. Beside the results it returns an int64 tensor: 0, or the address of
 * the exception that stands for them. (All returns are tensors since torch_call_dispatcher of torch 2.11 and 2.13 takes
 * the types of returns in the wrong order. The two strings, last on the stack, go as addresses of C strings: 2.11 leaks
 * a string that goes through it.) */
static void slow(const char* name, Word* stack, int arguments, int results) {
  const Word contract = stack[arguments - 2], layout = stack[arguments - 1];
  const char* text[2] = {"", ""};
  Word copy[16], error = 0;
  void* data = NULL;
  int i, failed;
  memcpy(copy, stack, (size_t)arguments * sizeof *copy);
  torch.string_c_str((Handle)(uintptr_t)contract, &text[0]);
  torch.string_c_str((Handle)(uintptr_t)layout, &text[1]);
  for (i = 0; i < 2; ++i) copy[arguments - 2 + i] = (Word)(uintptr_t)text[i];
  failed = torch.call_dispatcher(name, "", copy, kTorchAbi);
  torch.delete_string((Handle)(uintptr_t)contract);
  torch.delete_string((Handle)(uintptr_t)layout);
  if (failed)
    torch.check(0, "slow", "torch_dispatch.h", __LINE__, "ltx_inductor: the op failed; torch has logged why");
  if (!torch.get_data_ptr((Tensor)(uintptr_t)copy[results], &data)) error = *(const Word*)data;
  torch.delete_tensor((Tensor)(uintptr_t)copy[results]);
  if (!error) {
    memcpy(stack, copy, (size_t)results * sizeof *copy);
    return;
  }
  for (i = 0; i < results; ++i) torch.delete_tensor((Tensor)(uintptr_t)copy[i]);
  throw_python_error(error);
}

/* ---- the two ops, as torch calls them ---------------------------------------------------------------------------------- */
static void single_kernel(Word* s, uint64_t inputs, uint64_t outputs) {
  Argument arguments[4];
  const DLTensor* t[4];
  const char *contract = NULL, *layout = NULL;
  Tensor out[2] = {NULL, NULL};
  Call a;
  (void)inputs, (void)outputs;
  if (!read_tensors(s, 4, 1u << 1, arguments, t) && !torch.string_c_str((Handle)(uintptr_t)s[6], &contract) &&
      !torch.string_c_str((Handle)(uintptr_t)s[7], &layout)) {
    a.q = t[0], a.q_weight = t[1], a.q_cos = t[2], a.q_sin = t[3], a.k = a.k_weight = a.k_cos = a.k_sin = NULL;
    a.q_eps = a.k_eps = to_double(s[4]), a.q_heads = a.k_heads = (int64_t)s[5];
    if (serve(&a, contract, layout, out)) {
      free_arguments(s, 4, 1u << 1, s[6], s[7]);
      s[0] = (Word)(uintptr_t)out[0];
      return;
    }
  }
  slow("ltx_inductor::_rmsnorm_split_rope_slow", s, 8, 1);
}

static void pair_kernel(Word* s, uint64_t inputs, uint64_t outputs) {
  const unsigned optional = 1u << 2 | 1u << 3 | 1u << 6 | 1u << 7;
  Argument arguments[MAX_TENSORS];
  const DLTensor* t[MAX_TENSORS];
  const char *contract = NULL, *layout = NULL;
  Tensor out[2] = {NULL, NULL};
  Call a;
  (void)inputs, (void)outputs;
  if (!read_tensors(s, 8, optional, arguments, t) && !torch.string_c_str((Handle)(uintptr_t)s[12], &contract) &&
      !torch.string_c_str((Handle)(uintptr_t)s[13], &layout)) {
    a.q = t[0], a.k = t[1], a.q_weight = t[2], a.k_weight = t[3];
    a.q_cos = t[4], a.q_sin = t[5], a.k_cos = t[6], a.k_sin = t[7];
    a.q_eps = to_double(s[8]), a.k_eps = to_double(s[9]), a.q_heads = (int64_t)s[10], a.k_heads = (int64_t)s[11];
    if (serve(&a, contract, layout, out)) {
      free_arguments(s, 8, optional, s[12], s[13]);
      s[0] = (Word)(uintptr_t)out[0], s[1] = (Word)(uintptr_t)out[1];
      return;
    }
  }
  slow("ltx_inductor::_qk_rmsnorm_split_rope_slow", s, 14, 2);
}

/* Registers both kernels for a dispatch key, for as long as the process lives. Returns 0 where that cannot be, and then
 * nothing is registered. */
EXPORT int __tvm_ffi_rope_register(void* self, const TVMFFIAny* a, int32_t n, TVMFFIAny* result) {
  const char *space, *key;
  Handle python, library = NULL;
  Dl_info here; /* this library, which torch will call: it is never unloaded */
  size_t i;
  int ok;
  (void)self;
  if (n != 3) return fail("ValueError", "rope_register takes a namespace, a dispatch key and the tuple (-1,)");
  space = (const char*)(intptr_t)a[0].v_int64, key = (const char*)(intptr_t)a[1].v_int64;
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = 0;
  python = dlopen("libtorch_python.so", RTLD_NOW | RTLD_NOLOAD); /* and all of torch that it needs */
  for (i = 0; i < sizeof kTorchNames / sizeof *kTorchNames; ++i) {
    void* f = python ? dlsym(python, kTorchNames[i]) : NULL;
    if (!f) f = dlsym(RTLD_DEFAULT, kTorchNames[i]);
    if (!f && i < TORCH_REQUIRED) return 0;
    memcpy((char*)&torch + i * sizeof(void*), &f, sizeof f);
  }
  if (!torch.delete_optional && !torch.operator_delete) return 0;
  if (strcmp(key, "CUDA") == 0 && !torch.current_stream) return 0;
  dtype_bf16 = torch.dtype_bf16(), dtype_fp16 = torch.dtype_fp16(), dtype_fp32 = torch.dtype_fp32();
  device_type_cuda = torch.device_type_cuda();
  minus_one = (void*)(intptr_t)a[2].v_int64;
  if (!dladdr((void*)&served, &here) || !dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE)) return 0;
  if (torch.library_init_impl(space, key, "torch_dispatch.h", __LINE__, &library)) return 0;
  ok = !torch.library_impl(library, "rmsnorm_split_rope", single_kernel, kTorchAbi) &&
       !torch.library_impl(library, "qk_rmsnorm_split_rope", pair_kernel, kTorchAbi);
  if (!ok) torch.delete_library(library);
  result->v_int64 = ok;
  return 0;
}

EXPORT int __tvm_ffi_rope_recorded(void* self, const TVMFFIAny* a, int32_t n, TVMFFIAny* result) {
  (void)self, (void)a, (void)n;
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = (int64_t)(intptr_t)&recorded;
  return 0;
}
