// Attention with contextual positions on CPUs, forward and backward, for the custom calls of library.py.
//
//   s_ij = q_i·k_j/√K                          content logits
//   g_ij = σ(s_ij)  or  σ(x_i·u_j/√K)          gates, with separate queries x and gate keys u
//   p_ij = Σ_{j'=j..i} g_ij'                   positions, summed from the nearest key to the farthest
//   a_ij = softmax_j(s_ij + z_i(p_ij))         z_i(p) interpolates x_i·e[n] at min(p, N-1), or is m·p (a slope)
//   out_i = Σ_j a_ij v_j
//
// A strip of 64 queries of one head visits tiles of 64 keys, from the nearest to the farthest, with an online softmax.
// Once all rows of the strip have P_i ≥ N-1, farther keys add the constant x_i·e[N-1] and need no gates.
// Arrays are [B, L, H, K], row-major, float32. K is a multiple of 16.

#include <map>
#include <mutex>
#include <string>

#include "backward.h"

namespace ffi = xla::ffi;

namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Result = ffi::ResultBuffer<ffi::F32>;

// Arrays that a problem does not have are empty.
Problem problem(Floats q, Floats k, Floats v, Floats x, Floats u, Floats table, Floats slopes, Ints q_segments,
                Ints k_segments, bool causal, int64_t window) {
  Problem p{};
  auto size = [](auto array, int axis) { return (int)array.dimensions()[axis]; };
  p.B = size(q, 0), p.L = size(q, 1), p.H = size(q, 2), p.K = size(q, 3);
  p.M = size(k, 1), p.G = size(k, 2), p.KV = size(v, 3), p.N = size(table, 0);
  p.causal = causal, p.window = (int)std::min<int64_t>(window, 1 << 30), p.scale = 1 / std::sqrt((float)p.K);
  p.q = q.typed_data(), p.k = k.typed_data(), p.v = v.typed_data(), p.x = x.typed_data(), p.u = u.typed_data();
  p.table = table.typed_data(), p.slopes = slopes.typed_data();
  if (q_segments.element_count()) p.q_segments = q_segments.typed_data(), p.k_segments = k_segments.typed_data();
  return p;
}

// Calls f<GATE, POSITION>() for the kind of gates and positions.
template <class F>
void choose(int64_t gate, int64_t position, F f) {
  using std::integral_constant;
  auto with = [&](auto gate) {
    if (position == SLOPE) f(gate, integral_constant<Position, SLOPE>());
    else f(gate, integral_constant<Position, TABLE>());
  };
  if (gate == NO_GATE) f(integral_constant<Gate, NO_GATE>(), integral_constant<Position, TABLE>());
  else if (gate == OF_LOGITS) with(integral_constant<Gate, OF_LOGITS>());
  else with(integral_constant<Gate, OF_KEYS>());
}

// Runs f, unless the arrays do not fit each other or memory does not suffice.
template <class F>
ffi::Error checked(Floats k, Floats u, Floats table, int64_t gate, int64_t position, F f) {
  const auto K = k.dimensions()[3];
  const bool keys = gate != OF_KEYS || u.dimensions() == k.dimensions();
  const bool rows = gate == NO_GATE || position != TABLE || (table.dimensions()[0] > 1 && table.dimensions()[1] == K);
  if (K % 16 || !keys || !rows) return ffi::Error::InvalidArgument("attention: shapes of arrays do not fit");
  try {
    f();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "attention: not enough memory");
  }
  return ffi::Error::Success();
}

ffi::Error run_forward(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats x, Floats u, Floats table,
                       Floats slopes, Ints q_segments, Ints k_segments, Result out, Result logsumexp, bool causal,
                       int64_t window, int64_t gate, int64_t position) {
  const Problem p = problem(q, k, v, x, u, table, slopes, q_segments, k_segments, causal, window);
  return checked(k, u, table, gate, position, [&] { choose(gate, position, [&](auto gate, auto position) {
    forward<gate.value, position.value>(pool, p, out->typed_data(), logsumexp->typed_data());
  }); });
}

ffi::Error run_backward(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats x, Floats u, Floats table,
                        Floats slopes, Ints q_segments, Ints k_segments, Floats out, Floats logsumexp, Floats dout,
                        Result dq, Result dk, Result dv, Result dx, Result du, Result dtable, Result dslopes,
                        bool causal, int64_t window, int64_t gate, int64_t position) {
  const Problem p = problem(q, k, v, x, u, table, slopes, q_segments, k_segments, causal, window);
  return checked(k, u, table, gate, position, [&] { choose(gate, position, [&](auto gate, auto position) {
    const Arrays arrays{out.typed_data(), logsumexp.typed_data(), dout.typed_data(), dq->typed_data(), dk->typed_data(),
                        dv->typed_data(),  dx->typed_data(),        du->typed_data(),   nullptr,          nullptr};
    backward<gate.value, position.value>(pool, p, arrays, dtable->typed_data(), dslopes->typed_data());
  }); });
}

// Kernels that were compiled from tile programs, by the digest of their text.
using Generated = void (*)(void* const* in, void* const* out,
                           void (*parallel)(void* threads, int count, void (*work)(void*, int), void* arg), void* threads);
std::map<std::string, Generated>& kernels() {
  static std::map<std::string, Generated> all;
  return all;
}
std::mutex kernels_lock;

ffi::Error run_generated(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                         std::string_view digest) {
  Generated kernel;
  {
    std::lock_guard<std::mutex> guard(kernels_lock);
    kernel = kernels()[std::string(digest)];
  }
  if (!kernel) return ffi::Error::InvalidArgument("attention: this process has not loaded the kernel of this program");
  std::vector<void*> in, out;
  for (size_t i = 0; i < args.size(); i++) in.push_back(args.get<ffi::AnyBuffer>(i)->untyped_data());
  for (size_t i = 0; i < results.size(); i++) out.push_back((*results.get<ffi::AnyBuffer>(i))->untyped_data());
  try {
    kernel(in.data(), out.data(), [](void* threads, int count, void (*work)(void*, int), void* arg) {
      in_parallel(*static_cast<ffi::ThreadPool*>(threads), count, [=](int item) { work(arg, item); });
    }, &pool);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "attention: not enough memory");
  }
  return ffi::Error::Success();
}

}  // namespace

extern "C" void add_kernel(const char* digest, void* function) {
  std::lock_guard<std::mutex> guard(kernels_lock);
  kernels()[digest] = reinterpret_cast<Generated>(function);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Generate, run_generated,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets()
                                  .Attr<std::string_view>("digest"));

#define INPUTS                                                                                                     \
  ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>()    \
      .Arg<Floats>().Arg<Floats>().Arg<Ints>().Arg<Ints>()
#define OPTIONS Attr<bool>("causal").Attr<int64_t>("window").Attr<int64_t>("gate").Attr<int64_t>("position")

XLA_FFI_DEFINE_HANDLER_SYMBOL(Forward, run_forward, INPUTS.Ret<Floats>().Ret<Floats>().OPTIONS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(Backward, run_backward,
                              INPUTS.Arg<Floats>().Arg<Floats>().Arg<Floats>().Ret<Floats>().Ret<Floats>()
                                  .Ret<Floats>().Ret<Floats>().Ret<Floats>().Ret<Floats>().Ret<Floats>().OPTIONS);
