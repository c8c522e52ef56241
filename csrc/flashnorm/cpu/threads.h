// Rows over the threads of torch's own pool.
//
// A second pool beside torch's would oversubscribe the machine and ignore `torch.set_num_threads`. So
// the OpenMP runtime is the one that this process has loaded already, found by name at the first call:
// no -fopenmp, no link against a runtime, and gcc and clang code alike. `GOMP_parallel` is the entry
// point that libgomp, LLVM's libomp and Intel's libiomp5 share. Where there is none (macOS, a process
// without torch) everything runs on the calling thread, with the same bits.
//
// After fork() without exec(), libgomp's pool is unusable in the child, for torch as for this: set one
// thread there (torch's DataLoader does).
#pragma once

#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

namespace flashnorm {
namespace cpu {

struct OpenMp {
  using Body = void (*)(void*);

  void (*parallel)(Body, void*, unsigned threads, unsigned flags) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*in_parallel)() = nullptr;
  // at::get_num_threads where torch is loaded: OpenMP's own count is kept per thread, and a thread that
  // has not called torch yet does not know of torch.set_num_threads. Else omp_get_max_threads.
  int (*max_threads)() = nullptr;

  static const OpenMp& loaded() {
    static const OpenMp found = find();
    return found;
  }

 private:
  template <class F>
  static bool look_up(F& function, void* library, const char* name) {
    function = reinterpret_cast<F>(dlsym(library, name));
    return function != nullptr;
  }

  bool take(void* library) {
    return look_up(thread_num, library, "omp_get_thread_num") && look_up(num_threads, library, "omp_get_num_threads") &&
           look_up(in_parallel, library, "omp_in_parallel") && look_up(max_threads, library, "omp_get_max_threads") &&
           look_up(parallel, library, "GOMP_parallel");
  }

#if defined(__linux__)
  struct Libraries {
    char openmp[PATH_MAX] = "", torch[PATH_MAX] = "";
  };

  static void keep(char (&where)[PATH_MAX], const char* path) { std::snprintf(where, PATH_MAX, "%s", path); }

  // Paths only: nothing may be opened while the list is walked.
  static int visit(dl_phdr_info* info, size_t, void* to) {
    auto& libraries = *static_cast<Libraries*>(to);
    const char* path = info->dlpi_name ? info->dlpi_name : "";
    const char* slash = std::strrchr(path, '/');
    const char* name = slash ? slash + 1 : path;
    for (const char* stem : {"libgomp", "libiomp5", "libomp"}) {
      if (libraries.openmp[0] == 0 && std::strncmp(name, stem, std::strlen(stem)) == 0) keep(libraries.openmp, path);
    }
    if (std::strncmp(name, "libtorch_cpu.", 13) == 0) keep(libraries.torch, path);
    return 0;
  }
#endif

  static OpenMp find() {
    OpenMp found;
    bool complete = found.take(RTLD_DEFAULT);  // torch loads its runtime globally, and binds to the first one itself
#if defined(__linux__)
    Libraries libraries;
    dl_iterate_phdr(visit, &libraries);
    const auto opened = [](const char* path) {
      return path[0] == 0 ? nullptr : dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    };
    if (!complete) {
      void* library = opened(libraries.openmp);
      complete = library != nullptr && found.take(library);
    }
    if (complete) {
      if (void* torch = opened(libraries.torch)) {
        int (*count)() = nullptr;
        if (look_up(count, torch, "_ZN2at15get_num_threadsEv")) found.max_threads = count;
      }
    }
#endif
    if (!complete) found.parallel = nullptr;
    return found;
  }
};

// body(begin, end) over [0, rows), in one consecutive piece for every thread and about `grain` rows each or
// more. Results of rows do not depend on the split. `body` must not throw.
template <class F>
void parallel_rows(int64_t rows, int64_t grain, const F& body) {
  const OpenMp* omp = rows > grain ? &OpenMp::loaded() : nullptr;
  if (omp == nullptr || omp->parallel == nullptr || omp->in_parallel()) return body(int64_t(0), rows);
  const int limit = omp->max_threads();
  if (limit <= 1) return body(int64_t(0), rows);

  struct Shared {
    const F& body;
    const OpenMp& omp;
    int64_t rows;
    int64_t pieces;
  } shared{body, *omp, rows, (rows + grain - 1) / grain};
  // Always the whole team, as torch does: for a smaller one libgomp ends the threads that are left over, and
  // the next call that wants them starts new ones.
  omp->parallel(
      [](void* data) {
        const auto& work = *static_cast<const Shared*>(data);
        const int64_t team = work.omp.num_threads(), index = work.omp.thread_num();
        const int64_t count = work.pieces < team ? work.pieces : team;
        const int64_t share = work.rows / count, more = work.rows % count;
        const int64_t begin = index * share + (index < more ? index : more);
        const int64_t end = begin + share + (index < more ? 1 : 0);
        if (index < count) work.body(begin, end);
      },
      &shared, unsigned(limit), 0);
}

}  // namespace cpu
}  // namespace flashnorm
