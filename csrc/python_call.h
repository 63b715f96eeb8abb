/* What a compiled model calls (ltx_inductor/lowering.py): a Python callable in C that launches into outputs which Inductor
 * has allocated. Torch's dispatcher carries the op's 14 arguments to its kernel, and two results back, in 4.6 us; without it
 * half a microsecond is left beside the launch and the allocations (benchmarks/host.py). The third part of launcher.c.
 *
 *   call(q_out, k_out, q, k, q_weight, k_weight, q_cos, q_sin, k_cos, k_sin)     or     call(out, x, weight, cos, sin)
 *
 * What never changes between calls (contract, layout, eps, heads) is in the callable. Tensors are read through torch's
 * DLPack exchange table, without a reference taken. A call that fits a configuration in `served` is launched here, with
 * the checks of every other way in; any other one, and whatever goes wrong, goes as it came to `slow`, a Python function,
 * which runs the op and copies, or raises. */

/* CPython's stable ABI, as far as it is needed. The process is Python: its symbols are there. */
typedef struct _object PyObject;
typedef struct {
  const char* name;
  PyObject* (*function)(PyObject*, PyObject* const*, intptr_t);
  int flags;
  const char* doc;
} PyMethodDef;
extern PyObject _Py_NoneStruct;
extern PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
extern PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
extern void* PyCapsule_GetPointer(PyObject*, const char*);
extern PyObject* PyTuple_New(intptr_t);
extern int PyTuple_SetItem(PyObject*, intptr_t, PyObject*);
extern PyObject* PyObject_CallObject(PyObject*, PyObject*);
extern void PyErr_Clear(void);
extern void Py_IncRef(PyObject*);
extern void Py_DecRef(PyObject*);
extern void* PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void*);
enum { kMethFastcall = 0x0080 };

typedef struct {
  const DLPackExchangeAPI* dlpack;
  PyObject* slow;
  double q_eps, k_eps;
  int64_t q_heads, k_heads;
  int pair, bhsd;
  char contract[40];
} Prepared;
static const char kPrepared[] = "ltx_inductor.prepared";

/* Could allocate() have made it: the output of x, contiguous, at an address that every store is aligned to? */
static int is_output(const Config* c, const DLTensor* out, const DLTensor* x, int64_t heads) {
  const int64_t flat = !c->bhsd && !c->per_head;
  return out->dtype.lanes == 1 && (c->out_f32 ? out->dtype.bits == 32 && out->dtype.code == kDLFloat : is_16(c, out)) &&
         out->device.device_type == x->device.device_type && out->device.device_id == x->device.device_id &&
         out->ndim == (flat ? 3 : 4) && out->shape[0] == x->shape[0] && out->shape[c->bhsd ? 2 : 1] == x->shape[1] &&
         out->shape[c->bhsd ? 1 : 2] == (flat ? heads * c->head_dim : heads) && (flat || out->shape[3] == c->head_dim) &&
         contiguous(out) && (uintptr_t)address(out) % 16 == 0;
}

/* 1 if the call was launched; else 0, with no Python exception set. */
static int launch_prepared(const Prepared* p, PyObject* const* args) {
  const int sides = p->pair ? 2 : 1, count = p->pair ? 10 : 5;
  DLTensor views[10];
  const DLTensor* t[10];
  void *stream = NULL, *thread;
  Config* c;
  Call a;
  int i, failed;
  for (i = 0; i < count; ++i) {
    t[i] = NULL;
    if (args[i] == &_Py_NoneStruct) continue;
    if (p->dlpack->dltensor_from_py_object_no_sync(args[i], &views[i])) {
      PyErr_Clear();
      return 0;
    }
    t[i] = &views[i];
  }
  if (p->pair) {
    a.q = t[2], a.k = t[3], a.q_weight = t[4], a.k_weight = t[5], a.q_cos = t[6], a.q_sin = t[7], a.k_cos = t[8], a.k_sin = t[9];
    if (!t[1] || !a.k || !a.k_cos != !a.k_sin) return 0;
  } else {
    a.q = t[1], a.q_weight = t[2], a.q_cos = t[3], a.q_sin = t[4], a.k = a.k_weight = a.k_cos = a.k_sin = NULL;
  }
  if (!t[0] || !a.q || !a.q_cos || !a.q_sin) return 0;
  a.q_eps = p->q_eps, a.k_eps = p->k_eps, a.q_heads = p->q_heads, a.k_heads = p->k_heads;
  if (!(c = find(&a, p->contract, p->bhsd)) || read_call(c, &a) != 0) return 0;
  for (i = 0; i < sides; ++i) {
    if (!is_output(c, t[i], i ? a.k : a.q, i ? a.k_heads : a.q_heads)) return 0;
    a.params.side[i].out = address(t[i]);
  }
  if (c->device_type == kDLCPU) {
    record(&a);
    tally(c, &a);
    return 1;
  }
  if (p->dlpack->current_work_stream(kDLCUDA, a.q->device.device_id, &stream)) {
    PyErr_Clear();
    return 0;
  }
  thread = PyEval_SaveThread(); /* a launch waits while the device's queue is full */
  failed = start(c, &a, PATH_AUTO, stream);
  PyEval_RestoreThread(thread);
  if (!failed) tally(c, &a);
  return !failed;
}

static PyObject* call_prepared(PyObject* self, PyObject* const* args, intptr_t count) {
  const Prepared* p = PyCapsule_GetPointer(self, kPrepared);
  PyObject *all, *result;
  intptr_t i;
  if (!p) return NULL;
  if (count == (p->pair ? 10 : 5) && launch_prepared(p, args)) {
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
  }
  if (!(all = PyTuple_New(count))) return NULL;
  for (i = 0; i < count; ++i) {
    Py_IncRef(args[i]);
    PyTuple_SetItem(all, i, args[i]);
  }
  result = PyObject_CallObject(p->slow, all);
  Py_DecRef(all);
  return result;
}

/* A new callable, which lives as long as the process (so does the code that calls it); NULL with an exception set, or
 * without one where torch's exchange table is not the one that is known here. Called through ctypes.PyDLL. */
EXPORT PyObject* ltx_prepare_call(const DLPackExchangeAPI* dlpack, PyObject* slow, int pair, const char* contract, int bhsd,
                                  double q_eps, double k_eps, int64_t q_heads, int64_t k_heads) {
  static PyMethodDef method = {"ltx_rope", call_prepared, kMethFastcall, NULL};
  PyObject *self, *function;
  Prepared* p;
  if (dlpack->header.version.major != DLPACK_MAJOR_VERSION || !dlpack->dltensor_from_py_object_no_sync) return NULL;
  if (strlen(contract) >= sizeof p->contract || !(p = calloc(1, sizeof *p))) return NULL;
  p->dlpack = dlpack, p->slow = slow, p->pair = pair, p->bhsd = bhsd;
  p->q_eps = q_eps, p->k_eps = k_eps, p->q_heads = q_heads, p->k_heads = k_heads;
  strcpy(p->contract, contract);
  if (!(self = PyCapsule_New(p, kPrepared, NULL))) return NULL;
  if ((function = PyCFunction_NewEx(&method, self, NULL))) Py_IncRef(slow);
  Py_DecRef(self);
  return function;
}
