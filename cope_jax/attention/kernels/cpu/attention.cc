// The custom call of library.py, which runs the kernels that were compiled from tile programs with the threads of XLA.

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "matrices.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Work = void (*)(void* arg, int item);

// Calls work(arg, 0 … count-1). The caller works too, and never waits for a thread that has not begun: no deadlock.
// If memory does not suffice, all items end, and then this function throws.
void in_parallel(void* threads, int count, Work work, void* arg) {
  struct Progress {
    std::atomic<int> next{0}, finished{0};
    std::atomic<bool> failed{false};
  };
  auto& pool = *static_cast<ffi::ThreadPool*>(threads);
  auto progress = std::make_shared<Progress>();
  auto run = [progress, count, work, arg] {  // a late thread has no item left, and does not use `arg`
    for (int i; (i = progress->next++) < count; progress->finished++) try {
        work(arg, i);
      } catch (const std::bad_alloc&) {
        progress->failed = true;
      }
  };
  const int helpers = std::min<int64_t>(count, pool.num_threads()) - 1;
  for (int i = 0; i < helpers; i++) pool.Schedule([run] { run(); });
  run();
  for (int spins = 0; progress->finished.load() < count; spins++)
    if (spins >= 1000) std::this_thread::yield();
  if (progress->failed) throw std::bad_alloc();
}

// Kernels, by the digest of their text.
using Generated = void (*)(void* const* in, void* const* out, decltype(&in_parallel) parallel, void* threads, int count);
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
    kernel(in.data(), out.data(), in_parallel, &pool, std::max<int>(1, pool.num_threads()));
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

// Asks the system for the tiles of AMX, for all threads; returns whether there are any.
extern "C" bool allow_tiles() {
#if defined(__AMX_BF16__) && defined(__linux__)
  constexpr int REQUEST = 0x1023, TILES = 18;
  return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
#else
  return false;
#endif
}

// Returns whether tiles multiply whole numbers exactly; allow_tiles() must have returned true.
extern "C" bool tiles_agree() {
  constexpr int M = 33, N = 17, K = 40;
  static float a[M * K], b[K * N], sums[M * N];
  for (int i = 0; i < M * K; i++) a[i] = i % 7 - 3;
  for (int i = 0; i < K * N; i++) b[i] = i % 5 - 2;
  configure_tiles();
  tile_product<1, 1>(false, M, N, K, a, K, b, N, sums, N);
  release_tiles();
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      float sum = 0;
      for (int k = 0; k < K; k++) sum += a[m * K + k] * b[k * N + n];
      if (sum != sums[m * N + n]) return false;
    }
  return true;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Generate, run_generated,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets()
                                  .Attr<std::string_view>("digest"));
