// The ladder's matrix products with AVX2.

#if defined(__x86_64__)

#include <immintrin.h>

#define RETAIN_TARGET __attribute__((target("avx2,fma,f16c")))

#include "gemm_blocks.hpp"

namespace retain::gemm {
namespace {

struct Avx2 {
    typedef float Vector __attribute__((vector_size(32)));
    static constexpr std::size_t kHigh = 6, kVectors = 2;

    RETAIN_TARGET static inline __attribute__((always_inline)) void widen(const std::uint16_t* from, float* to,
                                                                          std::size_t count) {
        std::size_t i = 0;
        for (; i + 8 <= count; i += 8) {
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
        }
        for (; i < count; ++i) {
            to[i] = _cvtsh_ss(from[i]);
        }
    }
};

RETAIN_TARGET void project(const std::uint16_t* basis, std::size_t width, const float* numbers, std::size_t stride,
                           std::size_t tokens, float* out) {
    Blocks<Avx2>::project(basis, width, numbers, stride, tokens, out);
}

RETAIN_TARGET void spread(const std::uint16_t* basis, std::size_t width, const std::uint32_t* rows, std::size_t count,
                          const float* values, std::size_t tokens, float* out, std::size_t stride) {
    Blocks<Avx2>::spread(basis, width, rows, count, values, tokens, out, stride);
}

}  // namespace

const Kernels kAvx2 = {"avx2", project, spread};

}  // namespace retain::gemm

#endif
