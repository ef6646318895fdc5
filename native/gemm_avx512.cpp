// The ladder's matrix products with AVX-512.

#if defined(__x86_64__)

#include <immintrin.h>

#define RETAIN_TARGET __attribute__((target("avx512f,avx512vl,f16c,fma")))

#include "gemm_blocks.hpp"

namespace retain::gemm {
namespace {

struct Avx512 {
    typedef float Vector __attribute__((vector_size(64)));
    static constexpr std::size_t kHigh = 12, kVectors = 2;

    RETAIN_TARGET static inline __attribute__((always_inline)) void widen(const std::uint16_t* from, float* to,
                                                                          std::size_t count) {
        std::size_t i = 0;
        for (; i + 16 <= count; i += 16) {
            _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
        }
        for (; i < count; ++i) {
            to[i] = _cvtsh_ss(from[i]);
        }
    }
};

RETAIN_TARGET void project(const std::uint16_t* basis, std::size_t width, const float* numbers, std::size_t stride,
                           std::size_t tokens, float* out) {
    Blocks<Avx512>::project(basis, width, numbers, stride, tokens, out);
}

RETAIN_TARGET void spread(const std::uint16_t* basis, std::size_t width, const std::uint32_t* rows, std::size_t count,
                          const float* values, std::size_t tokens, float* out, std::size_t stride) {
    Blocks<Avx512>::spread(basis, width, rows, count, values, tokens, out, stride);
}

}  // namespace

const Kernels kAvx512 = {"avx512", project, spread};

}  // namespace retain::gemm

#endif
