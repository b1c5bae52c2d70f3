// Kernels of the GPU experiments. Each C function launches one on a stream and returns the CUDA status.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int THREADS = 256;

// Records the SM of each block. Blocks run long enough for every usable SM to get some.
__global__ void record_sms_kernel(uint32_t* out, long long cycles) {
  if (threadIdx.x == 0) {
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    out[blockIdx.x] = sm;
  }
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

// Bound by arithmetic: eight independent chains of fused multiply-adds a thread.
__global__ void compute_kernel(const float* __restrict__ in, float* __restrict__ out, int iterations) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const float factor = in[thread];
  float sums[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i] = factor * i;
  for (int n = 0; n < iterations; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = fmaf(sums[i], factor, factor);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += sums[i];
  out[thread] = sum;
}

enum Policy { PLAIN, STREAMING, EVICT_FIRST };

template <Policy policy>
__device__ uint4 load(const uint4* address, uint64_t evict_first) {
  if constexpr (policy == STREAMING) return __ldcs(address);
  if constexpr (policy == EVICT_FIRST) {
    uint4 got;
    asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                 : "l"(address), "l"(evict_first));
    return got;
  }
  return *address;
}

constexpr int LOADS = 8;  // in flight a thread

// Bound by memory, like a decode: each block reads one page, given by a table, once, and adds up its words.
template <Policy policy>
__global__ void read_pages_kernel(const uint4* __restrict__ pool, const int* __restrict__ table,
                                  uint32_t* __restrict__ out, int vectors) {
  uint64_t evict_first = 0;
  if constexpr (policy == EVICT_FIRST) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
  }
  const uint4* page = pool + static_cast<int64_t>(table[blockIdx.x]) * vectors;
  uint32_t sum = 0;
  for (int start = threadIdx.x; start < vectors; start += THREADS * LOADS) {
    uint4 got[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) got[i] = load<policy>(page + start + i * THREADS, evict_first);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) sum += got[i].x + got[i].y + got[i].z + got[i].w;
  }
  sum = __reduce_add_sync(0xffffffff, sum);
  __shared__ uint32_t sums[THREADS / 32];
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) sum += sums[i];
    out[blockIdx.x] = sum;
  }
}

}  // namespace

extern "C" {

// out: [blocks]
int record_sms(uint32_t* out, int blocks, long long cycles, cudaStream_t stream) {
  record_sms_kernel<<<blocks, 1024, 0, stream>>>(out, cycles);
  return cudaGetLastError();
}

// in, out: [blocks * 256]; 16 * iterations floating-point operations each
int compute(const float* in, float* out, int blocks, int iterations, cudaStream_t stream) {
  compute_kernel<<<blocks, THREADS, 0, stream>>>(in, out, iterations);
  return cudaGetLastError();
}

// pool: pages of `vectors` times 16 bytes, a multiple of 32 KiB; table, out: [pages]; policy: see Policy
int read_pages(const uint4* pool, const int* table, uint32_t* out, int pages, int vectors, int policy,
               cudaStream_t stream) {
  if (vectors % (THREADS * LOADS) != 0) return cudaErrorInvalidValue;
  switch (policy) {
    case PLAIN:
      read_pages_kernel<PLAIN><<<pages, THREADS, 0, stream>>>(pool, table, out, vectors);
      break;
    case STREAMING:
      read_pages_kernel<STREAMING><<<pages, THREADS, 0, stream>>>(pool, table, out, vectors);
      break;
    case EVICT_FIRST:
      read_pages_kernel<EVICT_FIRST><<<pages, THREADS, 0, stream>>>(pool, table, out, vectors);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

const char* error_text(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

}  // extern "C"
